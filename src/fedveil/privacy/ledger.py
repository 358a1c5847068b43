"""A client's ledger, which counts the rounds in which a data set has been used, over all runs and servers.

A round is written to the ledger before the client sends any message for it, because a server may recover a sum without
the client's last message, and a client may be killed at any time. Failed rounds are therefore counted too. The ledger
contains only numbers of rounds, from which epsilon is computed; it does not depend on the names or keys of runs.
"""

import json
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from fedveil.errors import Aborted, BadArgument
from fedveil.files import OWNER, convert_os_errors, make_folder, write_atomically
from fedveil.privacy.accounting import composed_epsilon, milestone

SCHEMA = 1
MAX_KINDS = 64  # maximum number of different settings; each makes epsilon slower to compute
Spent = dict[tuple[float, float], int]  # the number of rounds, by noise multiplier and sampling rate


class PrivacyLedger:
    """The number of rounds in which a data set has been used, in a file that only its owner can read.

    Args:
        path: path of the file, which is created in the first round.
        budget: the epsilon that may be spent over all runs.
        delta: the delta for which epsilon is computed.
    """

    def __init__(self, path: Path, budget: float, delta: float) -> None:
        self.path, self.budget, self.delta = path, budget, delta
        self._affordable: Spent = {}  # numbers of rounds that are known to stay within the budget

    def spent(self) -> Spent:
        """Return the number of rounds, by noise multiplier and sampling rate."""
        if not self.path.exists():
            return {}
        try:
            with convert_os_errors(self.path, "read"):
                found = json.loads(self.path.read_text())
            if found["schema"] != SCHEMA:
                raise ValueError
            rounds = {(float(noise), float(rate)): int(count) for noise, rate, count in found["rounds"]}
            if any(not noise > 0 or not 0 < rate <= 1 or count < 1 for (noise, rate), count in rounds.items()):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            what = "this ledger is damaged, so the epsilon spent so far is unknown"
            raise BadArgument(str(self.path), what, "restore it from a backup; do not delete it") from None
        return rounds

    def epsilon(self) -> float:
        """Return the epsilon spent in all rounds so far."""
        return composed_epsilon(self.spent(), self.delta)

    def charge(self, noise: float, rate: float) -> None:
        """Record one more round on disk; refuse a round that would exceed the budget."""
        kind = (noise, rate)
        make_folder(self.path.parent)
        with convert_os_errors(self.path), FileLock(self.path.with_name(self.path.name + ".lock"), mode=OWNER):
            spent = self.spent()
            if kind not in spent and len(spent) >= MAX_KINDS:
                what = f"this data set has been used with {MAX_KINDS} different settings"
                raise Aborted("budget", "ledger", what, "reuse one of these settings")
            spent[kind] = spent.get(kind, 0) + 1
            if not self._is_affordable(kind, spent):
                what = f"one more round would exceed this data set's budget of epsilon {self.budget:g}"
                raise Aborted("budget", "ledger", what, "train on other records, or raise the budget in the policy")
            rows = [[*kind, count] for kind, count in spent.items()]
            write_atomically(self.path, json.dumps({"schema": SCHEMA, "rounds": rows}), OWNER)

    def _is_affordable(self, kind: tuple[float, float], spent: Spent) -> bool:
        """Return whether the rounds stay within the budget; results are reused, because epsilon is slow to compute."""
        others = {other: count for other, count in spent.items() if other != kind}
        known = {other: count for other, count in self._affordable.items() if other != kind}
        if others == known and spent[kind] <= self._affordable.get(kind, 0):
            return True
        for count in (milestone(spent[kind]), spent[kind]):
            if composed_epsilon({**others, kind: count}, self.delta) <= self.budget:
                self._affordable = {**others, kind: count}
                return True
        return False


@lru_cache(maxsize=64)
def open_ledger(path: Path, budget: float, delta: float) -> PrivacyLedger:
    """Return a ledger that remembers, in this process, how many rounds are within the budget."""
    return PrivacyLedger(path, budget, delta)
