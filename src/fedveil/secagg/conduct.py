"""The members' conduct in a run, as the server knows it: who lied, and who disagrees with whom.

A member is excluded for the run, by name and with a reason, once a lie of its is proven, provided that no more than
`rules.liars(n)` members lie: as many as may vanish.

    alone      a signature, pair seed or share that misses the member's own hash, commitment or key
    complaints of more than that many members about one dealer; by one accuser about more than that many dealers
    disputes   about the seed of a pair, with more than that many partners over the run

One complaint, or one dispute, proves nothing: either side may be lying. A complaint costs the accuser's share and no
more. Of a disputed pair one is left out of the attempt, in turn, so that a liar costs an honest member at most every
other round.
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
        self._most = 1  # liars that were allowed for in the largest attempt
        self._left_out: Counter[str] = Counter()  # how often a dispute cost a member its place

    def __repr__(self) -> str:
        return f"Conduct(excluded={self._excluded!r})"

    @property
    def excluded(self) -> Mapping[str, str]:
        """Members that lied, and how."""
        return dict(self._excluded)

    def exclude(self, name: str, why: str) -> None:
        """Exclude a member whose lie is proven; the first reason stays."""
        self._excluded.setdefault(name, why)

    def judge_complaints(self, complaints: Mapping[str, Collection[str]], n: int) -> None:
        """Exclude accusers and dealers that cannot both be honest with `liars(n)` liars at most.

        Args:
            complaints: dealers whose share each member of an attempt could not use.
            n: members of the attempt.
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
        """Record the disputed pairs of an attempt; returns those who are left out of it.

        Of a pair that is the one who was left out less often; of two who were left out equally often, the one with more
        disputes. By disputes alone, two liars could keep an honest member out of every round.
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
