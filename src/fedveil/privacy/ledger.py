"""A client's ledger, which counts the rounds in which a data set has been used, over all runs and servers.

A round is written to the ledger before the client sends any message for it, because a server may recover a sum without
the client's last message, and a client may be killed at any time. Failed rounds are therefore counted too. The ledger
contains only numbers of rounds, from which epsilon is computed; it does not depend on the names or keys of runs.

The first round fixes the noise and the sampling rate, because a server that chose them after seeing earlier sums could
exceed the epsilon of any sequence fixed in advance. If the policy allows them to vary, epsilon is computed in a way
that covers such choices, but is larger.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from fedveil.errors import Aborted, BadArgument
from fedveil.files import OWNER, convert_os_errors, make_folder, write_atomically
from fedveil.privacy.accounting import composed_epsilon, filtered_epsilon, milestone

SCHEMA = 1
WAIT = 60.0  # maximum number of seconds to wait for another process, which may be computing epsilon
MAX_KINDS = 64  # maximum number of different settings; each makes epsilon slower to compute
Spent = dict[tuple[float, float], int]  # the number of rounds, by noise multiplier and sampling rate


class PrivacyLedger:
    """The number of rounds in which a data set has been used, in a file that only its owner can read.

    Args:
        path: path of the file, which is created in the first round.
        budget: the epsilon that may be spent over all runs.
        delta: the delta for which epsilon is computed.
        varying: whether rounds may differ in noise multiplier and sampling rate.
    """

    def __init__(self, path: Path, budget: float, delta: float, *, varying: bool = False) -> None:
        self.path, self.budget, self.delta, self.varying = path, budget, delta, varying
        self._lock = path.with_name(path.name + ".lock")  # also shows that the ledger has existed
        self._affordable: Spent = {}  # numbers of rounds that are known to stay within the budget

    def spent(self) -> Spent:
        """Return the number of rounds, by noise multiplier and sampling rate."""
        if self.path.is_symlink():  # replacing the file would separate it from other names
            raise BadArgument(str(self.path), "this ledger is a symbolic link", "move the file itself here")
        if not self.path.exists():
            if self._lock.exists():
                what = "this ledger is missing, so the epsilon spent so far is unknown"
                fix = f"restore it from a backup; if the records were never used, delete {self._lock.name}"
                raise BadArgument(str(self.path), what, fix)
            return {}
        try:
            with convert_os_errors(self.path, "read"):
                result = json.loads(self.path.read_text())
            if result["schema"] != SCHEMA:
                raise ValueError
            rounds = {(float(noise), float(rate)): count for noise, rate, count in result["rounds"]}
            if len(rounds) < len(result["rounds"]):
                raise ValueError  # the same settings twice
            for (noise, rate), count in rounds.items():
                if not 0 < noise < math.inf or not 0 < rate <= 1 or type(count) is not int or count < 1:
                    raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            what = "this ledger is damaged, so the epsilon spent so far is unknown"
            raise BadArgument(str(self.path), what, "restore it from a backup; do not delete it") from None
        return rounds

    def epsilon(self) -> float:
        """Return the epsilon spent in all rounds so far."""
        return self._epsilon(self.spent())

    def _epsilon(self, spent: Spent) -> float:
        if self.varying:
            return filtered_epsilon(spent, self.delta, self.budget)
        return composed_epsilon(spent, self.delta)

    def charge(self, noise: float, rate: float) -> None:
        """Record one more round on disk; refuse a round that would exceed the budget."""
        kind = (noise, rate)
        make_folder(self.path.parent)
        if not self._lock.exists() and not self.spent():
            self._create()
        with convert_os_errors(self.path), self._hold_lock():
            spent = self.spent()
            self._check_kind(kind, spent)
            spent[kind] = spent.get(kind, 0) + 1
            if not self._is_affordable(kind, spent):
                what = f"one more round would exceed this data set's budget of epsilon {self.budget:g}"
                raise Aborted("budget", "ledger", what, "train on other records, or raise the budget in the policy")
            write_atomically(self.path, _to_json(spent), OWNER)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Lock the ledger against other processes; refuse to wait for more than `WAIT` seconds."""
        lock = FileLock(self._lock, timeout=WAIT, mode=OWNER)
        try:
            lock.acquire()
        except Timeout:
            what = f"another process has locked this ledger for {WAIT:g} seconds"
            raise BadArgument(str(self.path), what, "end that process, or wait until it has finished") from None
        try:
            yield
        finally:
            lock.release()

    def _create(self) -> None:
        """Create an empty ledger, unless another process has just done so."""
        with contextlib.suppress(BadArgument):
            write_atomically(self.path, _to_json({}), OWNER, new=True)

    def _check_kind(self, kind: tuple[float, float], spent: Spent) -> None:
        """Refuse settings that differ from those of earlier rounds, or too many different ones."""
        if kind in spent and (self.varying or len(spent) == 1):
            return
        if self.varying and len(spent) >= MAX_KINDS:
            what = f"this data set has been used with {MAX_KINDS} different settings"
            raise Aborted("budget", "ledger", what, "reuse one of these settings")
        if spent and not self.varying:
            noise, rate = next(iter(spent))
            what = f"this data set has been used with noise {noise:g} and rate {rate:g}, which must not change"
            raise Aborted("budget", "ledger", what, "use these settings, or set varying = true in the client's policy")

    def _is_affordable(self, kind: tuple[float, float], spent: Spent) -> bool:
        """Return whether the rounds stay within the budget; results are reused, because epsilon is slow to compute."""
        others = {other: count for other, count in spent.items() if other != kind}
        known = {other: count for other, count in self._affordable.items() if other != kind}
        if others == known and spent[kind] <= self._affordable.get(kind, 0):
            return True
        for count in (milestone(spent[kind]), spent[kind]):
            if self._epsilon({**others, kind: count}) <= self.budget:
                self._affordable = {**others, kind: count}
                return True
        return False


def _to_json(spent: Spent) -> str:
    return json.dumps({"schema": SCHEMA, "rounds": [[*kind, count] for kind, count in spent.items()]})


@lru_cache(maxsize=64)
def open_ledger(path: Path, budget: float, delta: float, varying: bool) -> PrivacyLedger:
    """Return a ledger that remembers, in this process, how many rounds are within the budget."""
    return PrivacyLedger(path, budget, delta, varying=varying)
