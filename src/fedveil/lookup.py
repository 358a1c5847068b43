"""Find objects by name: in users' packages, among entry points, and as names that are imported on first use."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path

from fedveil.errors import BadArgument


def import_object(spec: str, kind: str, example: str) -> object:
    """Return the object that `package.module:name` names.

    Args:
        spec: the specification, as the user wrote it.
        kind: the kind of object for messages, such as "a model".
        example: a valid spec.
    """
    path, _, name = spec.partition(":")
    if not path or not name:
        raise BadArgument(spec, f"{kind} is named as package.module:name", f"use {example}")
    if "/" in path or path.endswith(".py"):
        dotted = ".".join(Path(path).with_suffix("").parts).lstrip(".")
        what = f"{path} is a file, but {kind} is named as package.module:name"
        raise BadArgument(spec, what, f"use {dotted}:{name}, and run where `import {dotted}` works")
    if path.partition(".")[0] != "fedveil":
        _search_working_directory()
    try:
        module: object = importlib.import_module(path)
    except ImportError as error:
        raise BadArgument(spec, f"cannot import {path}: {error}", f"run where `import {path}` works") from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        near = difflib.get_close_matches(name, [own for own in vars(module) if not own.startswith("_")], 1, 0.5)
        fix = f"use {path}:{near[0]}" if near else f"name something that {path} defines"
        raise BadArgument(spec, f"module {path} has no {name!r}", fix) from error


def _search_working_directory() -> None:
    """Find packages in the working directory too, after all others, so that no file in it hides an installed module."""
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.append(here)


@lru_cache(maxsize=8)
def list_installed(group: str) -> dict[str, str]:
    """Return the entry points of a group by name, each as `package.module:name`."""
    return {point.name: point.value for point in entry_points(group=group)}


def lazily(package: str, homes: Mapping[str, str], needs: str | None = None) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports a public name from its module when it is first used.

    Args:
        package: the package.
        homes: the module of each name.
        needs: a package that the modules import, and that the extra with the package's name installs.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            if needs is None or error.name != needs:
                raise
            what = f"{package}.{name} needs the package {needs}, which is not installed."
            fix = f"pip install 'fedveil[{package.rpartition('.')[2]}]'"
            raise ModuleNotFoundError(f"{what}\n  Fix: {fix}", name=needs) from None

    return find
