"""The basis of a result that is kept on disk: the version, data, code and checkpoint that it was made from."""

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from pydantic import JsonValue

import fedveil

AGAIN = "computed again"  # begins a line of progress that says why a kept result is not used


@dataclass(frozen=True)
class Basis:
    """Everything outside of the configuration that decides a result.

    Attributes:
        version: of this package; data that come with it, and its own code, are covered by it.
        data: SHA-256 of the files of each data set, or of the records that users' own code loads.
        code: SHA-256 of the source file of each module that the configuration names, without what it imports.
        study: the same of the module that an attack of another package is in.
        checkpoint: SHA-256 of the checkpoint of a run that is attacked as it is; None where the study trains.
    """

    version: str = field(default_factory=lambda: fedveil.__version__)
    data: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    study: dict[str, str] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def training(self) -> "Basis":
        """The part that decides a training run."""
        return replace(self, study={}, checkpoint=None)

    @property
    def records(self) -> "Basis":
        """The part that decides what is trained on records alone, such as a generator of images."""
        return replace(self.training, code={})

    def plain(self) -> dict[str, JsonValue]:
        """The values for a file; parts that are empty are left out."""
        return {name: value for name, value in asdict(self).items() if value not in ({}, None)}


def explain_change(old: Basis, new: Basis) -> str | None:
    """Return what changed between two bases, as a clause; None if nothing did."""
    if old.version != new.version:
        return f"fedveil {old.version} is now {new.version}"
    if old.data != new.data:
        return "the data changed"
    before, after = old.code | old.study, new.code | new.study
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        return f"the code of {', '.join(changed)} changed"
    if old.checkpoint != new.checkpoint:
        return "the run's checkpoint changed"
    return None


def written_at(path: Path) -> str:
    """Return when a file was written, to the minute."""
    return datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes")
