"""The basis of a stored result: the version, data, code and checkpoint that it was computed from."""

from dataclasses import asdict, dataclass, field, replace

from pydantic import JsonValue

import fedveil

AGAIN = "computed again"  # begins a line of progress that explains why a stored result is not used


@dataclass(frozen=True)
class Basis:
    """Everything outside of the configuration that decides a result.

    Attributes:
        version: version of this package, which covers its code and the data that come with it.
        data: SHA-256 of the files of each data set, or of the records that users' code loads.
        code: SHA-256 of the source file of each module that the configuration names, without its imports.
        study: the same of the module of an attack from another package.
        checkpoint: SHA-256 of the checkpoint of a user's run that is attacked; None where the study trains.
    """

    version: str = field(default_factory=lambda: fedveil.__version__)
    data: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    study: dict[str, str] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def training(self) -> "Basis":
        """Return the part that decides a training run."""
        return replace(self, study={}, checkpoint=None)

    @property
    def records(self) -> "Basis":
        """Return the part that decides a model trained on records alone, such as a generator of images."""
        return replace(self.training, code={})

    def to_plain(self) -> dict[str, JsonValue]:
        """Return the values for a file, without empty parts."""
        return {name: value for name, value in asdict(self).items() if value not in ({}, None)}


def explain_change(old: Basis, new: Basis) -> str | None:
    """Explain what changed between two bases, as a clause; None if nothing did."""
    if old.version != new.version:
        return f"fedveil {old.version} is now {new.version}"
    if old.data != new.data:
        return "the data changed"
    before, after = old.code | old.study, new.code | new.study
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        return f"the code of {', '.join(changed)} changed"
    return "the run's checkpoint changed" if old.checkpoint != new.checkpoint else None
