"""The basis of a stored result: the version, data, code and checkpoint that it was computed from."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.utils import _pytree as pytree

import fedveil
from fedveil.attacks.registry import find_attackers
from fedveil.data import Data
from fedveil.data.catalogue import find_source
from fedveil.defences import registry
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.lookup import import_object, list_installed
from fedveil.runs.build import load_user_data
from fedveil.runs.settings import Config, DataSettings

COMPUTED_AGAIN = "computed again"  # prefix of a progress message that explains why a stored result is not reused
CHUNK = 2**20  # number of tensor values to hash at once
V = TypeVar("V")


@dataclass(frozen=True)
class Basis:
    """Everything that determines a result besides the configuration.

    Attributes:
        version: version of this package, which identifies its code and the data that come with it.
        data: SHA-256 of the files of each data set, or of the records that a user's code loads.
        code: SHA-256 of the source file of each module that the configuration refers to, without its imports.
        study: SHA-256 of the source file of an attack from another package.
        checkpoint: SHA-256 of the checkpoint of the attacked run; None if the study trains the run itself.
    """

    version: str = field(default_factory=lambda: fedveil.__version__)
    data: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    study: dict[str, str] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def training(self) -> "Basis":
        """The fields that determine a training run."""
        return replace(self, study={}, checkpoint=None)

    @property
    def records(self) -> "Basis":
        """The fields that determine a model trained only on the data, such as an image generator."""
        return replace(self.training, code={})

    def to_plain(self) -> dict[str, JsonValue]:
        """Return the fields as JSON values, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value not in ({}, None)}


def explain_change(old_basis: Basis, new_basis: Basis) -> str | None:
    """Return a clause that explains what changed between two bases, or None if nothing changed."""
    if old_basis.version != new_basis.version:
        return f"fedveil {old_basis.version} is now {new_basis.version}"
    if old_basis.data != new_basis.data:
        return "the data changed"
    old_code, new_code = old_basis.code | old_basis.study, new_basis.code | new_basis.study
    changed = sorted(name for name in old_code.keys() | new_code.keys() if old_code.get(name) != new_code.get(name))
    if changed:
        return f"the code of {', '.join(changed)} changed"
    return "the run's checkpoint changed" if old_basis.checkpoint != new_basis.checkpoint else None


class Digests:
    """SHA-256 digests of data and code, each computed when it is first needed."""

    def __init__(self) -> None:
        self._files = cache(digest_files)
        self._records = cache(lambda name: digest_records(load_user_data(name)))

    def job_basis(self, task: V, attacked_run: Path | None = None) -> Basis:
        """Return the basis of a job, given its task and the run that the job attacks, if any."""
        result, module = self.configs_basis(find_configs(task)), type(task).__module__
        study = {} if _is_part_of_fedveil(module) else self._module_digests([module])
        digest = None if attacked_run is None else checkpoint.read_digest(attacked_run / checkpoint.LAST)
        return replace(result, study=study, checkpoint=digest)

    def configs_basis(self, configs: Iterable[Config]) -> Basis:
        """Return the basis of a result that depends only on these configurations."""
        configs = list(configs)
        data = {label: digest for config in configs for label, digest in self._data_digests(config.data)}
        modules = {spec.partition(":")[0] for config in configs for spec in list_specs(config)}
        return Basis(data=dict(sorted(data.items())), code=self._module_digests(modules))

    def _data_digests(self, settings: DataSettings) -> Iterator[tuple[str, str]]:
        name = settings.name
        if ":" in name:
            yield name, self._records(name)
        elif source := find_source(name, settings.path):  # None if the data set comes with the library
            label = f"{name} {settings.path}" if settings.path else name
            yield label, self._files(source)

    def _module_digests(self, names: Iterable[str]) -> dict[str, str]:
        files = {name: file for name in sorted(names) if (file := source_file(name)) is not None}
        return {name: self._files(file) for name, file in files.items()}


def find_configs(value: V) -> Iterator[Config]:
    """Yield the configurations in a dataclass, at any depth."""
    if isinstance(value, Config):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from find_configs(element)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from find_configs(getattr(value, item.name))


def list_specs(config: Config) -> list[str]:
    """Return the names (`package.module:name`) of all code from other packages that a configuration uses."""
    names = (config.data.name, config.model.name, config.defence.name)
    specs = [name for name in names if registry.refers_to_code(name)]
    with contextlib.suppress(BadArgument):  # the job that builds the defence reports the error
        record = registry.find(config.defence.name)
        specs += [list_installed(registry.GROUP).get(config.defence.name, record.target), record.target]
        specs += [record.attackers] if record.attackers else []
        specs += sorted(find_attackers(record).modules())
    return [spec for spec in specs if not _is_part_of_fedveil(spec)]


def _is_part_of_fedveil(module: str) -> bool:
    return module.partition(":")[0].partition(".")[0] == "fedveil"


def source_file(module: str) -> Path | None:
    """Return the source file of a module, or None if it has no file or cannot be imported."""
    with contextlib.suppress(BadArgument):
        if module not in sys.modules:
            import_object(f"{module}:__name__", "code", "my_package.models:net")
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if file and Path(file).is_file() else None
    return None


def digest_files(source: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of all files in a folder; hidden files are skipped."""
    try:
        if not source.is_dir():
            return _digest_file(source)
        names = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
        visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        lines = "".join(f"{name.as_posix()}\0{_digest_file(source / name)}\0" for name in visible)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise BadArgument(str(error.filename or source), message, "make the file or folder readable") from error
    return f"sha256:{hashlib.sha256(os.fsencode(lines)).hexdigest()}"


def _digest_file(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise BadArgument(str(path), "it is not a regular file", "pass a regular file")
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def digest_records(data: Data) -> str:
    """Return the SHA-256 of a data set: of its records, with their types and shapes, and of its description."""
    result = hashlib.sha256()
    for part in (data.train, data.validation, data.test):
        leaves = [] if part is None else [*pytree.tree_leaves(part.inputs), part.targets]
        result.update(f"{len(leaves)} leaves\0".encode())
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                result.update(os.fsencode(f"{leaf!r}\0"))
                continue
            result.update(f"{leaf.dtype} {tuple(leaf.shape)}\0".encode())
            for values in torch.split(leaf.detach().cpu().reshape(-1).contiguous(), CHUNK):
                result.update(values.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    columns = {name: values.tolist() for name, values in data.columns.items()}
    result.update(os.fsencode(repr((data.classes, columns, data.scale, data.target_scale))))
    return f"sha256:{result.hexdigest()}"
