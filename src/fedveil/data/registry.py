"""Loading by name. A loader enters itself with a decorator; its keyword-only parameters are its options."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedveil.data.choices import choose
from fedveil.data.records import Data
from fedveil.errors import BadArgument

Loader = Callable[..., Data]
LOADERS: dict[str, Loader] = {}
_PLAIN = (bool, int, float, str, type(None))


def dataset(name: str) -> Callable[[Loader], Loader]:
    """Enter a loader under a name."""

    def enter(loader: Loader) -> Loader:
        LOADERS[name] = loader
        return loader

    return enter


def load(name: str, *, path: str | Path | None = None, **options: Any) -> Data:
    """Load a data set.

    Without `path` its files are looked for in the folder `name` of $FEDVEIL_DATA. Images are decoded once and kept in
    $FEDVEIL_CACHE (default ~/.cache/fedveil). The same name, files and options always give the same records in the
    same order.

    Args:
        name: one of `fedveil.data.available()`, such as "digits", "bank", "cifar10", "lesion", "images", "csv".
        path: the file or folder to read instead.
        **options: what this data set offers; an unknown one is refused with the list.

    Returns:
        The data set, in memory.

    Raises:
        BadArgument: the name or an option is unknown, or a file is missing, damaged or mislabelled.

    Example:
        >>> load("digits")
        Data('digits', train=1438, test=359, input (64,), 10 classes)
    """
    loader = LOADERS[choose("load", "data set", name, LOADERS)]
    hints = typing.get_type_hints(loader)
    where = f"load({name!r})"
    names = [item.name for item in inspect.signature(loader).parameters.values()]
    if path is not None:
        if "path" not in names:
            raise BadArgument(where, "it comes with the library and takes no path", f"load({name!r})")
        options["path"] = Path(path).expanduser()
    _check_options(where, options, {option: hints[option] for option in names})
    return loader(**options)


def _check_options(where: str, options: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuse options that the loader does not have, and plain values of the wrong type."""
    for option, value in options.items():
        hint = hints[choose(where, "option", option, hints)]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not all(kind in _PLAIN for kind in kinds):
            continue
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        if not fits:
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise BadArgument(where, f"{option} is {value!r}", f"{option} as {wanted}")
