"""SHA-256 of what results are made from: files of data, loaded records, source files, checkpoints."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.attacks.registry import find_attackers
from fedveil.data import Data
from fedveil.data.catalogue import ABOUT, find_files
from fedveil.defences import registry
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.lookup import imported, installed
from fedveil.runs.build import load_own_data
from fedveil.runs.config import Config, DataSettings
from fedveil.studies.basis import Basis

V = TypeVar("V")
CHUNK = 2**20  # bytes of a file that are in memory at once
OURS = "fedveil"
EXAMPLE = "my_package.models:net"


class Hash(Protocol):
    """A hash of `hashlib` that takes bytes."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


class Digests:
    """Digests of one command, each computed when it is first asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def basis_of(self, work: V, attacked: Path | None = None) -> Basis:
        """Return the basis of a work by its configurations, and by the run that it attacks as it is."""
        found = self.basis_of_configs(configs_in(work))
        home = type(work).__module__
        study = {} if _is_ours(home) else self._modules([home])
        digest = None if attacked is None else checkpoint.digest_of(attacked / checkpoint.LAST)
        return Basis(found.version, found.data, found.code, study, digest)

    def basis_of_configs(self, configs: Iterable[Config]) -> Basis:
        """Return the basis of whatever is computed from configurations alone."""
        every = list(configs)
        data = {label: digest for config in every for label, digest in self._data(config.data)}
        modules = {spec.partition(":")[0] for config in every for spec in specs_of(config)}
        return Basis(data=dict(sorted(data.items())), code=self._modules(modules))

    def _data(self, asked: DataSettings) -> Iterator[tuple[str, str]]:
        name = asked.name
        if ":" in name:
            yield name, self._once("data", name, lambda: digest_of_data(load_own_data(name)))
        elif source := source_in(asked):
            label = f"{name} {asked.path}" if asked.path else name
            yield label, self._once("data", str(source), partial(digest_of_files, source))

    def _modules(self, names: Iterable[str]) -> dict[str, str]:
        files = {name: file for name in sorted(names) if (file := source_file(name)) is not None}
        return {name: self._once("code", str(file), partial(digest_of_files, file)) for name, file in files.items()}

    def _once(self, kind: str, what: str, compute: Callable[[], str]) -> str:
        if (kind, what) not in self._known:
            self._known[kind, what] = compute()
        return self._known[kind, what]


def configs_in(value: V) -> Iterator[Config]:
    """Yield the configurations in a dataclass, at any depth."""
    if isinstance(value, Config):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from configs_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from configs_in(getattr(value, one.name))


def specs_of(config: Config) -> list[str]:
    """Return all code of other packages that a configuration names, as `package.module:name`.

    Attackers in the record of a defence are among it.
    """
    specs = [name for name in (config.data.name, config.model.name, config.defence.name) if ":" in name]
    with contextlib.suppress(BadArgument):  # the job that builds it says what is wrong with it
        record = registry.find(config.defence.name)
        specs += [installed(registry.GROUP).get(config.defence.name, record.target)]
        specs += [spec for spec in (record.target, record.attackers) if spec]
        specs += sorted(find_attackers(record).modules())
    return [spec for spec in specs if not _is_ours(spec)]


def _is_ours(module: str) -> bool:
    return module.partition(":")[0].partition(".")[0] == OURS


def source_file(module: str) -> Path | None:
    """Return the file of a module; None if it has none, or cannot be imported."""
    with contextlib.suppress(BadArgument):
        if module not in sys.modules:
            imported(f"{module}:__name__", "code", EXAMPLE)
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if file and Path(file).is_file() else None
    return None


def source_in(asked: DataSettings) -> Path | None:
    """Return the file or folder that a data set is read from; None if it comes with the library."""
    path = Path(os.path.expanduser(asked.path)) if asked.path else None
    about = ABOUT.get(asked.name)
    return find_files(asked.name, path) if about and about.files else path


def digest_of_files(source: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files in a folder but for hidden ones."""
    found = hashlib.sha256()
    try:
        if not source.is_dir():
            _add_file(found, source)
        else:
            names = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
            for name in [name for name in names if not any(part.startswith(".") for part in name.parts)]:
                found.update(
                    f"{name.as_posix()}\0{(source / name).stat().st_size}\0".encode("utf-8", "surrogateescape")
                )
                _add_file(found, source / name)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BadArgument(str(error.filename or source), what, "name files and folders that can be read") from error
    return f"sha256:{found.hexdigest()}"


def _add_file(found: Hash, path: Path) -> None:
    if path.exists() and not path.is_file():
        raise BadArgument(str(path), "it is not a regular file", "name a file")
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)


def digest_of_data(data: Data) -> str:
    """Return the SHA-256 of all records of a data set, with their types and shapes, and of what describes them."""
    found = hashlib.sha256()
    for part in (data.train, data.validation, data.test):
        leaves = [] if part is None else [*pytree.tree_leaves(part.inputs), part.targets]
        found.update(f"{len(leaves)} leaves\0".encode())
        for leaf in leaves:
            _add_leaf(found, leaf)
    columns = {name: values.tolist() for name, values in data.columns.items()}
    about = repr((data.classes, columns, data.scale, data.target_scale))
    found.update(about.encode("utf-8", "surrogateescape"))
    return f"sha256:{found.hexdigest()}"


def _add_leaf(found: Hash, leaf: V) -> None:
    if not isinstance(leaf, Tensor):
        found.update(f"{leaf!r}\0".encode("utf-8", "surrogateescape"))
        return
    found.update(f"{leaf.dtype} {tuple(leaf.shape)}\0".encode())
    for values in torch.split(leaf.detach().cpu().reshape(-1).contiguous(), CHUNK):
        found.update(values.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
