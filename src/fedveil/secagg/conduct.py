"""The members' conduct in a run, as the server knows it: who lied, and who disagrees with whom.

A member is excluded for the rest of the run, by name and with a reason, once it is proven to have lied, provided that
at most `rules.liars(n)` members lie, which is how many may drop out.

    evidence    a signature, pair seed or share that does not match the member's own hash, commitment or key
    complaints  by more than liars(n) members about one dealer, or by one accuser about more than liars(n) dealers
    disputes    about the seed of a pair, with more than liars(n) partners over the run

A single complaint or dispute proves nothing: either side may be lying. A complaint costs only the accuser's share. Of
a disputed pair one member is left out of the attempt; they take turns, so that a liar costs an honest member at most
every other round.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from fedveil.secagg.rules import liars

Pair = tuple[str, str]  # in the order of names


class Conduct:
    """The members' conduct in one run."""

    def __init__(self) -> None:
        self._excluded: dict[str, str] = {}
        self._partners: dict[str, set[str]] = {}
        self._most = 1  # liars tolerated in the largest attempt
        self._left_out: Counter[str] = Counter()  # how often a dispute kept a member out

    def __repr__(self) -> str:
        return f"Conduct(excluded={self._excluded!r})"

    @property
    def excluded(self) -> Mapping[str, str]:
        """The members that lied, with the reason."""
        return dict(self._excluded)

    def exclude(self, name: str, why: str) -> None:
        """Exclude a member that is proven to have lied; the first reason stays."""
        self._excluded.setdefault(name, why)

    def judge_complaints(self, complaints: Mapping[str, Collection[str]], n: int) -> None:
        """Exclude accusers and dealers that must be lying if there are at most `liars(n)` liars.

        Args:
            complaints: the dealers whose shares each member of an attempt could not use.
            n: number of members of the attempt.
        """
        most = liars(n)
        for accuser, dealers in complaints.items():
            if len(dealers) > most:
                self.exclude(accuser, f"it complained about the shares of {len(dealers)} of {n} members")
        against = Counter(
            dealer for accuser, dealers in complaints.items() if accuser not in self._excluded for dealer in dealers
        )
        for dealer, count in against.items():
            if count > most:
                self.exclude(dealer, f"{count} of {n} members complained about its shares")

    def settle_disputes(self, pairs: Iterable[Pair], n: int) -> set[str]:
        """Record the disputed pairs of an attempt and return the members that are left out of it.

        Of each pair it is the member that was left out less often so far; in a tie, the one with more disputes. If the
        number of disputes alone decided, two liars could keep an honest member out of every round.
        """
        disputed = {(min(pair), max(pair)) for pair in pairs}
        self._most = most = max(self._most, liars(n))  # partners add up over attempts, also with fewer members
        for one, other in disputed:
            self._partners.setdefault(one, set()).add(other)
            self._partners.setdefault(other, set()).add(one)
        for name, partners in self._partners.items():
            if len(partners) > most:
                self.exclude(name, f"the seeds of its pairs differ from those of {len(partners)} members")
        out = {name for name in self._excluded if any(name in pair for pair in disputed)}
        while left := sorted(pair for pair in disputed if not out & set(pair)):
            counts = Counter(name for pair in left for name in pair)
            worst = max(counts.values())
            pair = next(pair for pair in left if worst in (counts[pair[0]], counts[pair[1]]))
            out.add(min(pair, key=lambda name: (self._left_out[name], -counts[name], name == pair[0])))
        self._left_out.update(out)
        return out
