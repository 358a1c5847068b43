"""SHA-256 digests of everything that results are made from: data files, loaded records, source files, checkpoints."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

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
CHUNK = 2**20  # values of a tensor that are hashed at once
OURS = "fedveil"
EXAMPLE = "my_package.models:net"


class Digests:
    """Digests of one command, each computed when it is first needed."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def job_basis(self, work: V, attacked: Path | None = None) -> Basis:
        """Return the basis of a job: its configurations, its code, and the user's run that it attacks."""
        found = self.configs_basis(configs_in(work))
        home = type(work).__module__
        study = {} if _is_ours(home) else self._modules([home])
        digest = None if attacked is None else checkpoint.digest_of(attacked / checkpoint.LAST)
        return Basis(found.version, found.data, found.code, study, digest)

    def configs_basis(self, configs: Iterable[Config]) -> Basis:
        """Return the basis of everything that is computed from configurations alone."""
        every = list(configs)
        data = {label: digest for config in every for label, digest in self._data(config.data)}
        modules = {spec.partition(":")[0] for config in every for spec in list_specs(config)}
        return Basis(data=dict(sorted(data.items())), code=self._modules(modules))

    def _data(self, settings: DataSettings) -> Iterator[tuple[str, str]]:
        name = settings.name
        if ":" in name:
            yield name, self._once(name, lambda: digest_records(load_own_data(name)))
        elif source := source_path(settings):
            label = f"{name} {settings.path}" if settings.path else name
            yield label, self._once(str(source), partial(digest_files, source))

    def _modules(self, names: Iterable[str]) -> dict[str, str]:
        files = {name: file for name in sorted(names) if (file := source_file(name)) is not None}
        return {name: self._once(str(file), partial(digest_files, file)) for name, file in files.items()}

    def _once(self, what: str, compute: Callable[[], str]) -> str:
        if what not in self._known:
            self._known[what] = compute()
        return self._known[what]


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


def list_specs(config: Config) -> list[str]:
    """List the code of other packages that a configuration names, as `package.module:name`.

    It includes the attackers of a defence.
    """
    specs = [name for name in (config.data.name, config.model.name, config.defence.name) if ":" in name]
    with contextlib.suppress(BadArgument):  # the job that builds it reports the mistake
        record = registry.find(config.defence.name)
        specs += [installed(registry.GROUP).get(config.defence.name, record.target), record.target]
        specs += [record.attackers] if record.attackers else []
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


def source_path(settings: DataSettings) -> Path | None:
    """Return the file or folder of a data set; None if it comes with the library."""
    path = Path(os.path.expanduser(settings.path)) if settings.path else None
    about = ABOUT.get(settings.name)
    return find_files(settings.name, path) if about and about.files else path


def digest_files(source: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of all files in a folder except hidden ones."""
    try:
        if not source.is_dir():
            return _digest_file(source)
        names = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
        shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        lines = "".join(f"{name.as_posix()}\0{_digest_file(source / name)}\0" for name in shown)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BadArgument(str(error.filename or source), what, "name files and folders that can be read") from error
    return f"sha256:{hashlib.sha256(os.fsencode(lines)).hexdigest()}"


def _digest_file(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise BadArgument(str(path), "it is not a regular file", "name a file")
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def digest_records(data: Data) -> str:
    """Return the SHA-256 of all records of a data set, with their types, shapes and description."""
    found = hashlib.sha256()
    for part in (data.train, data.validation, data.test):
        leaves = [] if part is None else [*pytree.tree_leaves(part.inputs), part.targets]
        found.update(f"{len(leaves)} leaves\0".encode())
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                found.update(os.fsencode(f"{leaf!r}\0"))
                continue
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}\0".encode())
            for values in torch.split(leaf.detach().cpu().reshape(-1).contiguous(), CHUNK):
                found.update(values.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    columns = {name: values.tolist() for name, values in data.columns.items()}
    found.update(os.fsencode(repr((data.classes, columns, data.scale, data.target_scale))))
    return f"sha256:{found.hexdigest()}"
