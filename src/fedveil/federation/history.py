"""The records of a run's rounds."""

from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
NO_EVALUATION = "no evaluation: pass test= to fit"


class Latest(Record):
    """A record whose missing metrics are explained."""

    def __missing__(self, key: str) -> Any:
        if self.get("evaluated"):
            raise KeyError(key)
        raise KeyError(f"{key}: {NO_EVALUATION}")


@dataclass
class History:
    """One record per round: round, epoch, seconds, error; metrics where the model was evaluated."""

    records: list[Record] = field(default_factory=list)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric, of the rounds that have it; refuses a name that no record has."""
        points = [(record["round"], record[name]) for record in self.records if name in record]
        if self.records and not points:
            evaluated = any(record.get("evaluated") for record in self.records)
            known = ", ".join(sorted(self.names - {"round", "evaluated"}))
            raise KeyError(f"{name}: no record has it; there are {known}" + ("" if evaluated else f"; {NO_EVALUATION}"))
        return points

    @property
    def names(self) -> set[str]:
        """Everything that some record has."""
        return {name for record in self.records for name in record}

    @property
    def last(self) -> Record:
        """The latest record with an evaluation; without any, the latest record: round, epoch, error, lr, seconds."""
        evaluated = (record for record in reversed(self.records) if record.get("evaluated"))
        return Latest(next(evaluated, self.records[-1] if self.records else {}))
