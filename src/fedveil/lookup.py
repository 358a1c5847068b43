"""Find objects by name: in users' packages, in entry points, and in modules that are imported on first use."""

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
    """Import and return the object specified as `package.module:name`.

    Args:
        spec: the user's specification.
        kind: the kind of object, such as "a model", for error messages.
        example: a valid specification, for error messages.
    """
    path, _, name = spec.partition(":")
    if not path or not name:
        raise BadArgument(spec, f"{kind} must be given as package.module:name", f"use {example}")
    if "/" in path or path.endswith(".py"):
        module_name = ".".join(Path(path).with_suffix("").parts).lstrip(".")
        message = f"{path} is a file, but {kind} must be given as package.module:name"
        raise BadArgument(spec, message, f"use {module_name}:{name}, and make sure that `import {module_name}` works")
    if path.partition(".")[0] != "fedveil":
        _search_working_directory()
    try:
        module: object = importlib.import_module(path)
    except ImportError as error:
        raise BadArgument(spec, f"cannot import {path}: {error}", f"make sure that `import {path}` works") from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        matches = difflib.get_close_matches(
            name, [attribute for attribute in vars(module) if not attribute.startswith("_")], 1, 0.5
        )
        fix = f"use {path}:{matches[0]}" if matches else f"use a name that {path} defines"
        raise BadArgument(spec, f"module {path} has no attribute {name!r}", fix) from error


def _search_working_directory() -> None:
    """Append the working directory to `sys.path`, where its files cannot shadow installed modules."""
    working_directory = str(Path.cwd())
    if not {working_directory, ""} & set(sys.path):
        sys.path.append(working_directory)


@lru_cache(maxsize=8)
def list_installed(group: str) -> dict[str, str]:
    """Map the names of a group's entry points to their values, `package.module:name`."""
    return {entry_point.name: entry_point.value for entry_point in entry_points(group=group)}


def lazy_getattr(package: str, modules: Mapping[str, str], dependency: str | None = None) -> Callable[[str], object]:
    """Return a `__getattr__` for a package that imports each public name from its module on first use.

    Args:
        package: the package's full name.
        modules: the module that defines each name.
        dependency: a package that the modules import; the extra named after `package` installs it.
    """

    def import_name(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            if dependency is None or error.name != dependency:
                raise
            message = f"{package}.{name} needs the package {dependency}, which is not installed."
            fix = f"run pip install 'fedveil[{package.rpartition('.')[2]}]'"
            raise ModuleNotFoundError(f"{message}\n  Fix: {fix}", name=dependency) from None

    return import_name
