"""The server's side of one attempt: it adds what it cannot read, and opens the sum over those who stayed.

    take_upload ...   settle  take_settled ...  (again while someone vanishes)   reveal  take_revealed ...   total

It knows nothing of transport and never waits: whoever has not been taken when the next step begins has vanished. What
one client sent and does not count is a BadArgument, and the client counts as vanished; Aborted ends the attempt.

Nobody is believed: both ends of a pair must have committed to the same seed, an opened seed must fit its commitment,
and the first word of the sum must be the number of those it is over.
"""

from collections import Counter
from itertools import combinations

from fedveil.checks import whole
from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import masks
from fedveil.secagg.fixed import Words
from fedveil.secagg.identity import Roster
from fedveil.secagg.messages import Opening, Reveal, Revealed, Settle, Settled, Upload, context, sealed_bytes
from fedveil.secagg.rules import LEAST, threshold
from fedveil.secagg.shares import join_seed, subsets


class Tally:
    """One attempt to add up.

    Args:
        opening: as it was sent in M1.
        digest: SHA-256 of all the bytes of M1.
        size: how many words each client sends.
        roster: who may take part. With it, a client whose signature is wrong counts as vanished; without it, the other
            clients find out, and if too few signatures are left they refuse to reveal.
    """

    def __init__(self, opening: Opening, digest: bytes, size: int, roster: Roster | None = None) -> None:
        if len(opening.roster) < LEAST:
            raise Aborted("few", "opening", f"{len(opening.roster)} members are too few: at least {LEAST}")
        self._names, self._roster = opening.names, roster
        if len(set(self._names)) != len(self._names):
            raise Aborted("roster", "opening", "it names a member twice")
        self._place = {name: place for place, name in enumerate(self._names)}
        self._threshold = threshold(len(self._names))
        self._context = context(opening, digest)
        self._size = whole("Tally", "size", size)
        self._uploads: dict[str, Upload] = {}
        self._settle: Settle | None = None
        self._answers: dict[str, Settled] = {}  # of the last step
        self._seeds: dict[tuple[int, int], bytes] = {}  # by (who stayed, who did not)
        self._reveal: Reveal | None = None
        self._revealed: dict[str, Revealed] = {}

    def __repr__(self) -> str:
        return f"Tally({len(self.survivors)} of {len(self._names)} members)"

    @property
    def survivors(self) -> tuple[str, ...]:
        """Whom the sum is over, as far as that is known."""
        return self._settle.members if self._settle else tuple(name for name in self._names if name in self._uploads)

    def take_upload(self, name: str, data: bytes) -> None:
        """M2; one that comes late is discarded unread."""
        self._expect("upload", name, self._names, self._settle is None)
        if name in self._uploads:
            raise BadArgument("upload", f"{name} has uploaded already")
        upload = Upload.from_bytes(data, len(self._names), self._size)
        self._bound("upload", name, upload.context)
        self._uploads[name] = upload

    def settle(self) -> tuple[bytes, dict[str, bytes]]:
        """M3: bytes for all who are left, and bytes for each of them alone."""
        if self._reveal or (self._settle and self.settled()):
            raise BadArgument("settle", "those left have agreed already", "reveal()")
        if self._settle is None:
            members, step = self._matching(), 0
        else:
            named = {dealer for answer in self._answers.values() for dealer in answer.failed}
            members = [name for name in self._settle.members if name in self._answers and name not in named]
            step = self._settle.step + 1
        if len(members) < self._threshold:
            what = f"{len(members)} of {len(self._names)} clients are left: at least {self._threshold}"
            raise Aborted("few", "settle", what, "a new attempt")
        self._settle, self._answers = Settle(self._context, step, tuple(members)), {}
        own = {name: self._dealt_to(name, members) if step == 0 else b"" for name in members}
        return self._settle.to_bytes(), own

    def take_settled(self, name: str, data: bytes) -> None:
        """M4."""
        settle = self._settle
        self._expect("settled", name, settle.members if settle else (), settle is not None and self._reveal is None)
        assert settle is not None
        stayed = set(settle.members)
        outside = [other for other in self._names if other not in stayed]
        answer = Settled.from_bytes(data, len(outside))
        self._bound("settled", name, answer.context)
        if answer.step != settle.step or name in self._answers:
            raise BadArgument("settled", f"{name} answers another step, or twice")
        if not set(answer.failed) <= stayed - {name}:
            raise BadArgument("settled", f"{name} complains about strangers or itself")
        if self._roster and not self._roster.verifies(name, answer.signature, settle.signed()):
            raise BadArgument("settled", f"the signature of {name} is wrong")
        place, committed = self._place[name], self._uploads[name].commitments
        seeds = {(place, self._place[d]): seed for d, seed in zip(outside, answer.seeds, strict=True)}
        if any(masks.commitment(seed, self._context) != committed[lost] for (_, lost), seed in seeds.items()):
            raise BadArgument("settled", f"a pair seed of {name} does not fit its commitment")
        self._answers[name] = answer
        self._seeds |= seeds

    def settled(self) -> bool:
        """Whether all who are left have agreed, and nobody's share was found wanting."""
        if self._settle is None:
            return False
        return set(self._answers) == set(self._settle.members) and not any(a.failed for a in self._answers.values())

    def reveal(self) -> bytes:
        """M5: the signatures of all who are left."""
        if not self.settled():
            raise BadArgument("reveal", "those left have not agreed yet", "settle()")
        assert self._settle is not None
        signatures = {name: self._answers[name].signature for name in self._settle.members}
        self._reveal = Reveal(self._settle, signatures)
        return self._reveal.to_bytes()

    def take_revealed(self, name: str, data: bytes) -> None:
        """M6."""
        self._expect("revealed", name, self.survivors, self._reveal is not None)
        if name in self._revealed:
            raise BadArgument("revealed", f"{name} has revealed already")
        revealed = Revealed.from_bytes(data)
        self._bound("revealed", name, revealed.context)
        if not set(revealed.shares) <= set(self.survivors):
            raise BadArgument("revealed", f"{name} reveals shares of clients that are not left")
        self._revealed[name] = revealed

    def total(self) -> Words:
        """The sum over `survivors`, modulo 2^64, once everything about it is checked."""
        if self._reveal is None:
            raise BadArgument("total", "nothing was revealed yet", "reveal()")
        if len(self._revealed) < self._threshold:
            what = f"{len(self._revealed)} of {len(self._names)} clients have revealed: at least {self._threshold}"
            raise Aborted("few", "reveal", what)
        members = self.survivors
        own = [self._own_seed(name) for name in members]
        stayed = {self._place[name] for name in members}
        pairs = {pair: seed for pair, seed in self._seeds.items() if pair[0] in stayed and pair[1] not in stayed}
        total = masks.unmask([self._uploads[name].words for name in members], own, pairs)
        counted(total, len(members))
        return total

    def _own_seed(self, name: str) -> bytes:
        """A client's self seed from t shares; if one share is wrong and there are more, from others."""
        place = self._place[name]
        shares = {self._place[by] + 1: m.shares[name] for by, m in self._revealed.items() if name in m.shares}
        wanted = self._uploads[name].commitments[place]
        if len(shares) >= self._threshold:
            for chosen in subsets(sorted(shares), self._threshold):
                try:
                    seed = join_seed({at: shares[at] for at in chosen})
                except Aborted:
                    continue
                if masks.commitment(seed, self._context) == wanted:
                    return seed
        what = f"{len(shares)} shares of the seed of {name} do not give it: at least {self._threshold} right ones"
        raise Aborted("share", "total", what)

    def _matching(self) -> list[str]:
        """Those who uploaded, without those whose pair seeds are not the ones that the others committed to."""
        left = [name for name in self._names if name in self._uploads]
        while odd := Counter(name for pair in combinations(left, 2) if self._differs(*pair) for name in pair):
            most = max(odd.values())
            left = [name for name in left if odd[name] < most]
        return left

    def _differs(self, one: str, other: str) -> bool:
        ours, theirs = self._uploads[one].commitments, self._uploads[other].commitments
        return ours[self._place[other]] != theirs[self._place[one]]

    def _dealt_to(self, name: str, dealers: list[str]) -> bytes:
        """The shares that others dealt to a client, encrypted."""
        place = self._place[name]
        others = [dealer for dealer in dealers if dealer != name]
        return sealed_bytes([self._uploads[d].sealed[place - (place > self._place[d])] for d in others])

    def _expect(self, kind: str, name: str, members: tuple[str, ...], due: bool) -> None:
        if not due or name not in members:
            raise BadArgument(kind, f"{name!r} is not asked for it now: it is late, early, or from a stranger")

    def _bound(self, kind: str, name: str, found: bytes) -> None:
        if found != self._context:
            raise BadArgument(kind, f"{name} answers another opening than was sent", "the same bytes to all clients")


def counted(total: Words, members: int) -> None:
    """The first word of a sum, to which every client gave 1, is the number of clients; it is not if a mask is left."""
    if int(total[0]) != members:
        raise Aborted("sum", "total", f"the masks of {members} clients do not cancel: one of them is wrong")
