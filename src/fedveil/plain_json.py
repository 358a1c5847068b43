"""JSON that every program reads: NaN and infinity, which JSON does not have, are written as null or as text."""

import json
import math
from typing import Any


def to_json(value: Any, indent: int | None = None, *, exact: bool = False) -> str:
    """A value as JSON.

    Args:
        value: what `json.dumps` takes.
        indent: of nested values; all on one line by default.
        exact: write what is not finite as text, such as "inf", which pydantic reads back as a number; by default it is
            null.

    >>> to_json({"loss": math.inf, "rounds": 3}), to_json([math.nan, -math.inf], exact=True)
    ('{"loss": null, "rounds": 3}', '["nan", "-inf"]')
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # something in it is not finite
        return json.dumps(_replaced(value, exact), indent=indent, allow_nan=False)


def _replaced(value: Any, exact: bool) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(inner, exact) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner, exact) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value)) if exact else None
    return value
