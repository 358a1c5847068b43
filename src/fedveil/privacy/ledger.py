"""A client's ledger, which counts the rounds in which a data set has been used, over all runs and servers.

A round is written to the ledger before the client sends any message for it, because a server may recover a sum without
the client's last message, and a client may be killed at any time. Failed rounds are therefore counted too. The ledger
contains only round counts, from which epsilon is computed; it does not depend on the names or keys of runs.

The first round fixes the noise and the sampling rate, because a server that chose them after seeing earlier sums could
exceed the epsilon of any sequence fixed in advance. If the policy allows them to vary, the computed epsilon
is larger, so that it covers such choices.
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
LOCK_TIMEOUT = 60.0  # maximum number of seconds to wait for another process, which may be computing epsilon
MAX_SETTINGS = 64  # maximum number of different settings; each of them slows down the computation of epsilon
RoundCounts = dict[tuple[float, float], int]  # the number of rounds, by noise multiplier and sampling rate


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
        self._affordable: RoundCounts = {}  # round counts that are known to be within the budget

    def spent(self) -> RoundCounts:
        """Return the number of rounds, by noise multiplier and sampling rate."""
        if self.path.is_symlink():  # writing would replace the link, not the file
            raise BadArgument(str(self.path), "this ledger is a symbolic link", "replace the link with the file")
        if not self.path.exists():
            if self._lock.exists():
                message = "this ledger is missing, so the epsilon spent so far is unknown"
                fix = f"restore it from a backup; if the records were never used, delete {self._lock.name}"
                raise BadArgument(str(self.path), message, fix)
            return {}
        try:
            with convert_os_errors(self.path, "read"):
                result = json.loads(self.path.read_text())
            if result["schema"] != SCHEMA:
                raise ValueError
            rounds = {(float(noise), float(rate)): count for noise, rate, count in result["rounds"]}
            if len(rounds) < len(result["rounds"]):
                raise ValueError  # the same settings appear twice
            for (noise, rate), count in rounds.items():
                if not 0 < noise < math.inf or not 0 < rate <= 1 or type(count) is not int or count < 1:
                    raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            message = "this ledger is damaged, so the epsilon spent so far is unknown"
            raise BadArgument(str(self.path), message, "restore it from a backup; do not delete it") from None
        return rounds

    def epsilon(self) -> float:
        """Return the epsilon spent in all rounds so far."""
        return self._epsilon(self.spent())

    def _epsilon(self, round_counts: RoundCounts) -> float:
        if self.varying:
            return filtered_epsilon(round_counts, self.delta, self.budget)
        return composed_epsilon(round_counts, self.delta)

    def charge(self, noise: float, rate: float) -> None:
        """Record one more round on disk; refuse a round that would exceed the budget."""
        setting = (noise, rate)
        make_folder(self.path.parent)
        if not self._lock.exists() and not self.spent():
            self._create()
        with convert_os_errors(self.path), self._hold_lock():
            round_counts = self.spent()
            self._check_setting(setting, round_counts)
            round_counts[setting] = round_counts.get(setting, 0) + 1
            if not self._is_affordable(setting, round_counts):
                message = f"one more round would exceed this data set's budget of epsilon {self.budget:g}"
                raise Aborted("budget", "ledger", message, "train on other records, or raise the budget in the policy")
            write_atomically(self.path, _to_json(round_counts), OWNER)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Lock the ledger against other processes; raise an error after `LOCK_TIMEOUT` seconds."""
        lock = FileLock(self._lock, timeout=LOCK_TIMEOUT, mode=OWNER)
        try:
            lock.acquire()
        except Timeout:
            message = f"another process has locked this ledger for {LOCK_TIMEOUT:g} seconds"
            raise BadArgument(str(self.path), message, "end that process, or wait until it has finished") from None
        try:
            yield
        finally:
            lock.release()

    def _create(self) -> None:
        """Create an empty ledger, unless another process has just done so."""
        with contextlib.suppress(BadArgument):
            write_atomically(self.path, _to_json({}), OWNER, new=True)

    def _check_setting(self, setting: tuple[float, float], round_counts: RoundCounts) -> None:
        """Refuse settings that differ from those of earlier rounds, or too many different settings."""
        if setting in round_counts and (self.varying or len(round_counts) == 1):
            return
        if self.varying and len(round_counts) >= MAX_SETTINGS:
            message = f"this data set has been used with {MAX_SETTINGS} different settings"
            raise Aborted("budget", "ledger", message, "reuse one of these settings")
        if round_counts and not self.varying:
            noise, rate = next(iter(round_counts))
            message = f"this data set has been used with noise {noise:g} and rate {rate:g}, which must not change"
            raise Aborted(
                "budget", "ledger", message, "use these settings, or set varying = true in the client's policy"
            )

    def _is_affordable(self, setting: tuple[float, float], round_counts: RoundCounts) -> bool:
        """Return whether the rounds stay within the budget; results are reused, because epsilon is slow to compute."""
        other_counts = {other: count for other, count in round_counts.items() if other != setting}
        affordable_counts = {other: count for other, count in self._affordable.items() if other != setting}
        if other_counts == affordable_counts and round_counts[setting] <= self._affordable.get(setting, 0):
            return True
        for count in (milestone(round_counts[setting]), round_counts[setting]):
            if self._epsilon({**other_counts, setting: count}) <= self.budget:
                self._affordable = {**other_counts, setting: count}
                return True
        return False


def _to_json(round_counts: RoundCounts) -> str:
    return json.dumps({"schema": SCHEMA, "rounds": [[*setting, count] for setting, count in round_counts.items()]})


@lru_cache(maxsize=64)
def open_ledger(path: Path, budget: float, delta: float, varying: bool) -> PrivacyLedger:
    """Return a ledger, cached in this process together with the number of rounds known to be within the budget."""
    return PrivacyLedger(path, budget, delta, varying=varying)
