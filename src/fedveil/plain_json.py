"""Write JSON without NaN or infinity, so that any program can read it; read JSON and TOML with clear errors."""

import json
import math
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from fedveil.errors import BadArgument
from fedveil.files import convert_os_errors

SCHEMA = 1  # version of the files in a run's folder
PYTHON = "python"  # section of config.json in the folder of a run that `fedveil train` did not start
MAX_DEPTH = 100  # maximum nesting depth: more than any of Fedveil's files needs, but far below Python's recursion limit
Value = TypeVar("Value")


def to_json(value: Any, indent: int | None = None, *, exact: bool = False) -> str:
    """Return a value as JSON.

    Args:
        value: any value that `json.dumps` accepts.
        indent: number of spaces per level; by default, everything is on one line.
        exact: whether to write infinity and NaN as strings such as "inf", which pydantic reads as numbers, or as null.

    >>> to_json({"loss": math.inf, "rounds": 3}), to_json([math.nan, -math.inf], exact=True)
    ('{"loss": null, "rounds": 3}', '["nan", "-inf"]')
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # `value` contains infinity or NaN
        return json.dumps(_replace_nonfinite(value, exact), indent=indent, allow_nan=False)


def _replace_nonfinite(value: Any, exact: bool) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item, exact) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item, exact) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value)) if exact else None
    return value


def parse_json(where: str, text: str) -> Any:
    """Parse JSON text; `where` identifies it in errors.

    >>> parse_json("config.json", "[1, 2")
    Traceback (most recent call last):
    ...
    fedveil.errors.BadArgument: config.json: invalid JSON: Expecting ',' delimiter: line 1 column 6 (char 5).
    """
    return _parse(where, "JSON", lambda: json.loads(text))


def read_json(path: Path) -> Any:
    """Read a JSON file; raise BadArgument with its name if it cannot be read."""
    return _parse(str(path), "JSON", lambda: json.loads(path.read_text()))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise BadArgument with its name if it cannot be read."""
    return _parse(str(path), "TOML", lambda: tomllib.loads(path.read_text()))


def check_schema(values: object, where: str) -> dict[str, object]:
    """Return the content of a file in a run's folder, without its schema version; refuse unknown versions."""
    if not isinstance(values, dict):
        raise BadArgument(
            where, f"must contain a JSON object, got {type(values).__name__}", "use the config.json of a run"
        )
    result = dict(values)
    if (schema := result.pop("schema", None)) != SCHEMA:
        message = f"has schema {schema!r}, but this version of Fedveil reads schema {SCHEMA}"
        raise BadArgument(where, message, "use the version of Fedveil that wrote it, or train again")
    return result


def _parse(where: str, format_name: str, parse: Callable[[], Value]) -> Value:
    too_deep = BadArgument(
        where, f"its values are nested more than {MAX_DEPTH} levels deep", "flatten the nested values"
    )
    try:
        with convert_os_errors(where, "read", f"pass the path of a readable {format_name} file"):
            value = parse()
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(where, f"invalid {format_name}: {error}") from error
    items: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        items = [item for container in items for item in _list_items(container)]
    if items:
        raise too_deep
    return value


def _list_items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
