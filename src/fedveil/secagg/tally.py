"""The server's side of one attempt: it adds what it cannot read, and opens the sum over those who stayed.

    take_upload ...   settle  take_settled ...  (again while someone vanishes)   reveal  take_revealed ...   total

It knows nothing of transport and never waits: whoever has not been taken when the next step begins has vanished. What
one client sent and does not count is a BadArgument, and the client counts as vanished; Aborted ends the attempt. Lies
that are proven go to the run's `Conduct`.

Nobody is believed: both ends of a pair must have committed to the same seed, an opened seed must fit its commitment,
a revealed share must fit the hash that its dealer gave, and the first word of the sum must be the number of those it is
over. A share that fits its hash is right or its dealer's lie, so up to n - t wrong ones are left out without decoding.
"""

from itertools import combinations

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import masks
from fedveil.secagg.conduct import Conduct
from fedveil.secagg.fixed import Words
from fedveil.secagg.identity import Roster
from fedveil.secagg.messages import Opening, Reveal, Revealed, Settle, Settled, Upload, context, sealed_bytes
from fedveil.secagg.rules import LEAST, threshold
from fedveil.secagg.shares import in_field, join_seed


class Tally:
    """One attempt to add up.

    Args:
        opening: as it was sent in M1.
        digest: SHA-256 of all the bytes of M1.
        roster: who may take part.
        conduct: the members' in the run so far.
    """

    def __init__(self, opening: Opening, digest: bytes, roster: Roster, conduct: Conduct | None = None) -> None:
        if len(opening.roster) < LEAST:
            raise Aborted("few", "opening", f"{len(opening.roster)} members are too few: at least {LEAST}")
        self._names, self._roster, self.conduct = opening.names, roster, conduct or Conduct()
        if len(set(self._names)) != len(self._names):
            raise Aborted("roster", "opening", "it names a member twice")
        self._place = {name: place for place, name in enumerate(self._names)}
        self._threshold = threshold(len(self._names))
        self._context, self._size, self._attempt = context(opening, digest), opening.size, opening.attempt
        self._uploads: dict[str, Upload] = {}
        self._hashes: dict[str, masks.ShareHash] = {}
        self._settle: Settle | None = None
        self._answers: dict[str, Settled] = {}  # of the last step
        self._disputing: set[str] = set()
        self._signatures: dict[str, bytes] = {}  # of the last step, as far as they were checked
        self._complaints: dict[str, set[str]] = {}  # dealers whose share an accuser cannot use
        self._seeds: dict[tuple[int, int], bytes] = {}  # by (who stayed, who did not)
        self._reveal: Reveal | None = None
        self._revealed: dict[str, dict[str, bytes]] = {}  # shares that fit their hash, by who revealed them and dealer

    def __repr__(self) -> str:
        return f"Tally({len(self.survivors)} of {len(self._names)} members)"

    @property
    def quarrelling(self) -> set[str]:
        """Members that complained about others, or disagree with others about the seed of their pair."""
        return set(self._complaints) | self._disputing

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
        self._hashes[name] = masks.ShareHash(self._context, name)

    def settle(self) -> tuple[bytes, dict[str, bytes]]:
        """M3: bytes for all who are left, and bytes for each of them alone."""
        if self._reveal or (self._settle and self.settled()):
            raise BadArgument("settle", "those left have agreed already", "reveal()")
        if self._settle is None:
            members, step = self._matching(), 0
        else:
            members = self._supported([name for name in self._settle.members if name in self._answers])
            step = self._settle.step + 1
        if len(members) < self._threshold:
            what = f"{len(members)} of {len(self._names)} clients are left: at least {self._threshold}"
            raise Aborted("few", "settle", what, "a new attempt")
        self._settle, self._answers, self._signatures = Settle(self._context, step, tuple(members)), {}, {}
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
        if not set(answer.failed) <= (stayed - {name} if settle.step == 0 else set()):
            self._exclude("settled", name, "it complained about strangers, itself, or too late")
        place, committed = self._place[name], self._uploads[name].commitments
        seeds = {(place, self._place[d]): seed for d, seed in zip(outside, answer.seeds, strict=True)}
        if any(masks.commitment(seed, self._context) != committed[lost] for (_, lost), seed in seeds.items()):
            self._exclude("settled", name, "a pair seed that it opened does not fit its commitment")
        self._answers[name] = answer
        if answer.failed:
            self._complaints[name] = set(answer.failed)
        self._seeds |= seeds

    def settled(self) -> bool:
        """Whether all who are left have agreed, and enough of them hold a share of each."""
        if len(self._signatures) == self._threshold:
            return True
        if self._settle is None or len(self._answers) < len(self._settle.members):
            return False
        if len(self._supported(list(self._settle.members))) < len(self._settle.members):
            return False
        return len(self._right_signatures(self._settle)) == self._threshold

    def reveal(self) -> bytes:
        """M5: the signatures of t of those who are left."""
        if not self.settled():
            raise BadArgument("reveal", "those left have not agreed yet", "settle()")
        assert self._settle is not None
        self._reveal = Reveal(self._settle, self._signatures)
        return self._reveal.to_bytes()

    def _right_signatures(self, settle: Settle) -> dict[str, bytes]:
        """Signatures of t members on a list, each checked; whoever signed wrongly is excluded.

        Others are checked in the next attempt, so that over two of them nobody is left out.
        """
        start = self._attempt * self._threshold % len(settle.members)
        for name in settle.members[start:] + settle.members[:start]:
            if len(self._signatures) == self._threshold:
                break
            if name in self._signatures:
                continue
            if self._roster.verifies(name, self._answers[name].signature, settle.signed()):
                self._signatures[name] = self._answers[name].signature
            else:
                self.conduct.exclude(name, "its signature on the members is wrong")
        return self._signatures

    def take_revealed(self, name: str, data: bytes) -> None:
        """M6. Shares that fit their hash count, also if others of the same member do not."""
        self._expect("revealed", name, self.survivors, self._reveal is not None)
        if name in self._revealed:
            raise BadArgument("revealed", f"{name} has revealed already")
        revealed = Revealed.from_bytes(data)
        self._bound("revealed", name, revealed.context)
        place = self._place[name]
        right = {
            dealer: share
            for dealer, share in revealed.shares.items()
            if dealer in self._hashes and self._hashes[dealer](share, place) == self._uploads[dealer].hashes[place]
        }
        for dealer in [dealer for dealer, share in right.items() if not in_field(share)]:
            self.conduct.exclude(dealer, "a share that it dealt is not an element of the field")
        self._revealed[name] = {dealer: share for dealer, share in right.items() if in_field(share)}
        if right.keys() != set(self.survivors) - self._complaints.get(name, set()):
            self._exclude("revealed", name, "it did not reveal the shares that it was dealt and did not dispute")

    def total(self) -> Words:
        """The sum over `survivors`, modulo 2^64, once everything about it is checked."""
        if self._reveal is None:
            raise BadArgument("total", "nothing was revealed yet", "reveal()")
        if len(self._revealed) < self._threshold:
            what = f"{len(self._revealed)} of {len(self._names)} clients have revealed: at least {self._threshold}"
            raise Aborted("few", "reveal", what)
        members = self.survivors
        own = [seed for name in members if (seed := self._own_seed(name)) is not None]
        if len(own) < len(members):
            liars = [name for name in members if name in self.conduct.excluded]
            why = f"; {', '.join(liars)} lied" if liars else ""
            raise Aborted("share", "total", f"{len(members) - len(own)} of {len(members)} self seeds are lost{why}")
        stayed = {self._place[name] for name in members}
        pairs = {pair: seed for pair, seed in self._seeds.items() if pair[0] in stayed and pair[1] not in stayed}
        total = masks.unmask([self._uploads[name].words for name in members], own, pairs)
        counted(total, len(members))
        return total

    def _own_seed(self, name: str) -> bytes | None:
        """A client's self seed, from t shares that fit their hashes; if it misses its commitment, the client lied."""
        place = self._place[name]
        shares = {self._place[by] + 1: own[name] for by, own in sorted(self._revealed.items()) if name in own}
        if len(shares) < self._threshold:
            return None
        chosen = {at: shares[at] for at in sorted(shares)[: self._threshold]}
        try:
            seed = join_seed(chosen)
            right = masks.commitment(seed, self._context) == self._uploads[name].commitments[place]
        except Aborted:
            right = False
        if right:
            return seed
        self.conduct.exclude(name, "the shares that it dealt do not give the seed that it committed to")
        return None

    def _matching(self) -> list[str]:
        """Those who uploaded, without one of each pair whose commitments to their common seed differ."""
        left = [name for name in self._names if name in self._uploads]
        disputed = [pair for pair in combinations(left, 2) if self._differs(*pair)]
        self._disputing = {name for pair in disputed for name in pair}
        out = self.conduct.settle_disputes(disputed, len(self._names)) if disputed else set()
        return [name for name in left if name not in out]

    def _supported(self, left: list[str]) -> list[str]:
        """Those of `left` that were not found to lie, and of whose shares at least t others and themselves hold one."""
        if self._complaints:
            self.conduct.judge_complaints(self._complaints, len(self._names))
        left = [name for name in left if name not in self.conduct.excluded]
        while self._complaints and (lost := {name for name in left if self._holders(name, left) < self._threshold}):
            left = [name for name in left if name not in lost]
        return left

    def _holders(self, dealer: str, left: list[str]) -> int:
        """How many of `left` can use their share of a dealer's seed."""
        return sum(dealer not in self._complaints.get(name, ()) for name in left)

    def _differs(self, one: str, other: str) -> bool:
        ours, theirs = self._uploads[one].commitments, self._uploads[other].commitments
        return ours[self._place[other]] != theirs[self._place[one]]

    def _dealt_to(self, name: str, dealers: list[str]) -> bytes:
        """The shares that others dealt to a client, encrypted, and their hashes."""
        place = self._place[name]
        uploads = {dealer: self._uploads[dealer] for dealer in dealers if dealer != name}
        sealed = [own.sealed[place - (place > self._place[dealer])] for dealer, own in uploads.items()]
        return sealed_bytes(sealed, [own.hashes[place] for own in uploads.values()])

    def _exclude(self, kind: str, name: str, why: str) -> None:
        self.conduct.exclude(name, why)
        raise BadArgument(kind, f"{name} is excluded: {why}")

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
