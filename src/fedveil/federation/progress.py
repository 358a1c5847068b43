"""One line about a round, the same for every engine."""

import time
from collections.abc import Callable

from fedveil.federation.evaluate import METRICS
from fedveil.federation.history import Record

EVERY = 1.0  # seconds between two lines


def line(record: Record, rounds: int) -> str:
    """A round's record in words: metrics, who answered, where the seconds went, bytes, faults."""
    parts = [f"round {record['round']}/{rounds}", *(f"{name} {record[name]:.4f}" for name in METRICS if name in record)]
    if "answers" in record:
        parts.append(f"{record['answers']} of {record['asked']} answered")
        wait, recovery = (record[f"seconds_{part}"] for part in ("waiting", "recovery"))
        work = f" (clients' work {record['seconds_work']:.3f} s)" if "seconds_work" in record else ""
        parts.append(f"waited {wait:.3f} s{work}, recovery {recovery:.3f} s")
        parts.append(f"{record['bytes_total'] / 1e6:.2f} MB")
    if "skipped" in record:
        parts.append(f"skipped: {record['skipped']}")
    for name, why in record.get("excluded", {}).items():
        parts.append(f"{name} is excluded: {why}")
    if faults := record.get("faults"):
        parts.append(f"{len(faults)} faults, the last: {faults[-1]}")
    return ", ".join(parts)


def printed(
    rounds: int, *, every: float = EVERY, show: Callable[[str], None] | None = None
) -> Callable[[Record], None]:
    """Prints the line of a round if the last one is `every` seconds ago, if it has faults, and of the last round.

    Args:
        rounds: of the whole run.
        every: seconds.
        show: in place of print.
    """
    last = -every

    def take(record: Record) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every or record.get("faults") or record["round"] == rounds:
            last = now
            (show or (lambda text: print(text, flush=True)))(line(record, rounds))

    return take
