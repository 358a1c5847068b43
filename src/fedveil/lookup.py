"""Objects of users' own packages: by `package.module:name`, or by an entry point of an installed package."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path

from fedveil.errors import BadArgument


def imported(spec: str, kind: str, example: str) -> object:
    """The object that `package.module:name` names.

    Args:
        spec: as the user wrote it.
        kind: what it should be, such as "a model", for messages.
        example: of a spec that would do.
    """
    path, _, name = spec.partition(":")
    if not path or not name:
        raise BadArgument(spec, f"{kind} is named as package.module:name", example)
    if "/" in path or path.endswith(".py"):
        fix = f"{'.'.join(Path(path).with_suffix('').parts).lstrip('.')}:{name}, where the file can be imported"
        raise BadArgument(spec, f"{path} is a file, and {kind} is named as package.module:name", fix)
    if path.partition(".")[0] != "fedveil":
        _look_here()
    try:
        module: object = importlib.import_module(path)
    except ImportError as error:
        raise BadArgument(spec, f"cannot import {path}: {error}", f"run where `import {path}` works") from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        known = [own for own in vars(module) if not own.startswith("_")]
        near = difflib.get_close_matches(name, known, 1, 0.5)
        fix = f"{path}:{near[0]} is the nearest" if near else f"name something that {path} defines"
        raise BadArgument(spec, f"module {path} has no {name!r}", fix) from error


def _look_here() -> None:
    """Let packages of the working directory be found too, after all others: no file of it hides an installed one."""
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.append(here)


@lru_cache(maxsize=8)
def installed(group: str) -> dict[str, str]:
    """The names that installed packages enter in a group of entry points, each with its `package.module:name`."""
    return {point.name: point.value for point in entry_points(group=group)}


def lazily(package: str, homes: Mapping[str, str], needs: str | None = None) -> Callable[[str], object]:
    """A package's `__getattr__`: public names are imported when they are first used, each from its own module.

    Args:
        package: whose names they are.
        homes: the module of each name.
        needs: what the modules import that comes with the extra of the package's name.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{package}.{homes[name]}")
        except ModuleNotFoundError as error:
            if needs is None or error.name != needs:
                raise
            what = f"{package}.{name} needs the package {needs}, which is not installed."
            fix = f"pip install 'fedveil[{package.rpartition('.')[2]}]'"
            raise ModuleNotFoundError(f"{what}\n  Fix: {fix}", name=needs) from None
        return getattr(home, name)

    return find
