"""Results of federations with hostile clients."""

from dataclasses import dataclass, field

from fedveil.studies.jobs import Failed, Result


@dataclass(frozen=True)
class Ending:
    """One run.

    Attributes:
        accuracy: on test records after the last round; None if the run ended earlier.
        ended: why it ended before its last round; "" if it did not.
        rounds: number of completed rounds.
        refused: number of refused updates of hostile clients.
        wronged: number of refused updates of honest clients.
    """

    accuracy: float | None
    ended: str
    rounds: int
    refused: int
    wronged: int


@dataclass(frozen=True)
class Endings(Result):
    """One attack under each limit.

    Attributes:
        runs: by the name of the limit.
        inapplicable: why there are no runs; "" if there are.
    """

    runs: dict[str, Ending] = field(default_factory=dict)
    inapplicable: str = ""


@dataclass(frozen=True)
class Poisoning(Result):
    """All attacks under one defence, each with one result per seed."""

    attacks: dict[str, list[Endings | Failed]]

    def endings(self, attack: str, limits: str) -> list[Ending]:
        """Return the runs of all seeds that did not fail."""
        done = [one.runs for one in self.attacks.get(attack, []) if isinstance(one, Endings)]
        return [runs[limits] for runs in done if limits in runs]

    def missing(self, attack: str) -> str:
        """Return why an attack has no figures; "" if it has some."""
        for one in self.attacks[attack]:
            if isinstance(one, Failed):
                return f"failed: {one.failed}"
            if one.inapplicable:
                return f"does not apply: {one.inapplicable}"
        return ""
