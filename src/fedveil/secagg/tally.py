"""The server's side of one attempt: add up vectors that the server cannot read, and open the sum over the survivors.

    take_upload ...  settle  take_settle_reply ... (again while members drop out)  reveal  take_reveal_reply ...  total

A tally is independent of the transport and never waits: a member that has not replied by the next step has dropped out.
An invalid reply raises BadArgument, and its sender counts as dropped out; Aborted ends the attempt. Proven lies are
recorded in the run's `Conduct`.

Nobody is trusted: both ends of a pair must have committed to the same seed, an opened seed must match its commitment, a
revealed share must match the hash that its dealer sent, and the first word of the sum must be the number of its
members. A share that does not match its hash is discarded. If matching shares do not yield the seed that the dealer
committed to, the dealer has lied.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, combinations

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import masks
from fedveil.secagg.fixed import Words
from fedveil.secagg.identity import Roster
from fedveil.secagg.messages import Opening, Reveal, RevealReply, Settle, SettleReply, Upload, context, pack_dealt
from fedveil.secagg.rules import MIN_MEMBERS, liars, threshold

Pair = tuple[str, str]  # sorted by name


class Conduct:
    """The members' conduct in a run, as known to the server: who lied, and who disagrees with whom.

    A member is excluded for the rest of the run, by name and with a reason, once it is proven to have lied. The proof
    assumes that at most `rules.liars(n)` members lie, the number that may drop out.

        evidence    a signature, pair seed or share that does not match the member's own hash, commitment or key
        complaints  by more than liars(n) members about one dealer, or by one accuser about more than liars(n) dealers
        disputes    about the seed of a pair, with more than liars(n) partners over the run

    A single complaint or dispute proves nothing: either side may be lying. A complaint costs only the accuser's share.
    One member of a disputed pair is left out of the attempt; the two members take turns, so that a liar costs an honest
    member at most every other round.
    """

    def __init__(self) -> None:
        self.excluded: dict[str, str] = {}  # the members that lied, with the reason
        self._partners: dict[str, set[str]] = {}
        self._max_liars = 1  # number of liars tolerated in the largest attempt
        self._left_out: Counter[str] = Counter()  # how often each member was left out because of a dispute

    def exclude(self, name: str, reason: str) -> None:
        """Exclude a member that is proven to have lied; keep the first reason."""
        self.excluded.setdefault(name, reason)

    def judge_complaints(self, complaints: Mapping[str, Collection[str]], n: int) -> None:
        """Exclude accusers and dealers that must be lying if there are at most `liars(n)` liars.

        Args:
            complaints: the dealers whose shares each member of an attempt could not use.
            n: number of members of the attempt.
        """
        max_liars = liars(n)
        for accuser, dealers in complaints.items():
            if len(dealers) > max_liars:
                self.exclude(accuser, f"it complained about the shares of {len(dealers)} of {n} members")
        credible = [dealers for accuser, dealers in complaints.items() if accuser not in self.excluded]
        for dealer, count in Counter(chain.from_iterable(credible)).items():
            if count > max_liars:
                self.exclude(dealer, f"{count} of {n} members complained about its shares")

    def settle_disputes(self, pairs: Iterable[Pair], n: int) -> set[str]:
        """Record the disputed pairs of an attempt, and return the members that are left out of it.

        Of each pair, the member that has been left out less often is left out; in a tie, the member with more disputes.
        If the number of disputes alone decided, two liars could keep an honest member out of every round.
        """
        disputed = {(min(pair), max(pair)) for pair in pairs}
        self._max_liars = max_liars = max(self._max_liars, liars(n))  # disputes add up over attempts, even smaller ones
        for first, second in disputed:
            self._partners.setdefault(first, set()).add(second)
            self._partners.setdefault(second, set()).add(first)
        for name, partners in self._partners.items():
            if len(partners) > max_liars:
                self.exclude(name, f"its pair seeds differ from those of {len(partners)} members")
        left_out = {name for name in self.excluded if any(name in pair for pair in disputed)}
        while remaining := sorted(pair for pair in disputed if not left_out & set(pair)):
            counts = Counter(name for pair in remaining for name in pair)
            max_count = max(counts.values())
            pair = next(pair for pair in remaining if max_count in (counts[pair[0]], counts[pair[1]]))
            left_out.add(min(pair, key=lambda name: (self._left_out[name], -counts[name], name == pair[0])))
        self._left_out.update(left_out)
        return left_out


class Tally:
    """The server's side of one attempt to compute a sum.

    Args:
        opening: the opening that was sent in M1.
        digest: SHA-256 of all the bytes of M1.
        roster: the members that may take part.
        conduct: the members' conduct in the run so far.
    """

    def __init__(self, opening: Opening, digest: bytes, roster: Roster, conduct: Conduct | None = None) -> None:
        if len(opening.roster) < MIN_MEMBERS:
            problem = f"{len(opening.roster)} members are too few: at least {MIN_MEMBERS} are needed"
            raise Aborted("few", "opening", problem)
        self._names, self._roster, self.conduct = opening.names, roster, conduct or Conduct()
        self._index = {name: index for index, name in enumerate(self._names)}
        self._threshold = threshold(len(self._names))
        self._context, self._size, self._attempt = context(opening, digest), opening.size, opening.attempt
        self._uploads: dict[str, Upload] = {}
        self._settle: Settle | None = None
        self._replies: dict[str, SettleReply] = {}  # to the last step
        self._disputants: set[str] = set()
        self._signatures: dict[str, bytes] = {}  # verified signatures on the last step
        self._complaints: dict[str, set[str]] = {}  # dealers whose shares an accuser cannot use
        self._seeds: dict[tuple[int, int], bytes] = {}  # keyed by (survivor, dropout)
        self._reveal: Reveal | None = None
        self._revealed: dict[str, dict[str, bytes]] = {}  # shares that match their hash, by revealer and dealer

    @property
    def conflicting_members(self) -> set[str]:
        """The members that complained about another member, or that disagree with one about the seed of their pair."""
        return set(self._complaints) | self._disputants

    @property
    def survivors(self) -> tuple[str, ...]:
        """The members whose vectors are summed, as far as is known."""
        return self._settle.members if self._settle else tuple(name for name in self._names if name in self._uploads)

    def take_upload(self, name: str, data: bytes) -> None:
        """Accept M2; refuse a late M2 without decoding it."""
        self._expect("upload", name, self._names, self._settle is None)
        if name in self._uploads:
            raise BadArgument("upload", f"{name} has already uploaded")
        upload = Upload.from_bytes(data, len(self._names), self._size)
        self._check_context("upload", name, upload.context)
        self._uploads[name] = upload

    def settle(self) -> tuple[bytes, dict[str, bytes]]:
        """Return M3: the bytes for all remaining members, and additional bytes for each of them."""
        if self._reveal or (self._settle and self.has_agreement()):
            raise BadArgument("settle", "the remaining members have already agreed", "call reveal()")
        if self._settle is None:
            members, step = self._matching_members(), 0
        else:
            responders = [name for name in self._settle.members if name in self._replies]
            members, step = self._recoverable_members(responders), self._settle.step + 1
        if len(members) < self._threshold:
            problem = f"{len(members)} of {len(self._names)} clients remain: at least {self._threshold} are needed"
            raise Aborted("few", "settle", problem, "start a new attempt")
        self._settle, self._replies, self._signatures = Settle(self._context, step, tuple(members)), {}, {}
        individual = {name: self._pack_dealt_shares(name, members) if step == 0 else b"" for name in members}
        return self._settle.to_bytes(), individual

    def take_settle_reply(self, name: str, data: bytes) -> None:
        """Accept M4."""
        settle = self._settle
        self._expect("settled", name, settle.members if settle else (), settle is not None and self._reveal is None)
        assert settle is not None
        survivors = set(settle.members)
        dropped = [other for other in self._names if other not in survivors]
        reply = SettleReply.from_bytes(data, len(dropped))
        self._check_context("settled", name, reply.context)
        if reply.step != settle.step or name in self._replies:
            raise BadArgument("settled", f"{name} replied to another step, or twice")
        if not set(reply.failed) <= (survivors - {name} if settle.step == 0 else set()):
            self._exclude("settled", name, "it complained about strangers, about itself, or too late")
        index, committed = self._index[name], self._uploads[name].commitments
        seeds = {(index, self._index[d]): seed for d, seed in zip(dropped, reply.seeds, strict=True)}
        if any(masks.commitment(seed, self._context) != committed[lost] for (_, lost), seed in seeds.items()):
            self._exclude("settled", name, "a pair seed that it opened does not match its commitment")
        self._replies[name] = reply
        if reply.failed:
            self._complaints[name] = set(reply.failed)
        self._seeds |= seeds

    def has_agreement(self) -> bool:
        """Return whether all remaining members have agreed, and enough of them hold a share of each seed."""
        if len(self._signatures) == self._threshold:
            return True
        if self._settle is None or len(self._replies) < len(self._settle.members):
            return False
        if len(self._recoverable_members(list(self._settle.members))) < len(self._settle.members):
            return False
        return len(self._check_signatures(self._settle)) == self._threshold

    def reveal(self) -> bytes:
        """Return M5: the signatures of t of the remaining members."""
        if not self.has_agreement():
            raise BadArgument("reveal", "the remaining members have not agreed yet", "call settle()")
        assert self._settle is not None
        self._reveal = Reveal(self._settle, self._signatures)
        return self._reveal.to_bytes()

    def _check_signatures(self, settle: Settle) -> dict[str, bytes]:
        """Return verified signatures of t members on M3; exclude members whose signature is wrong.

        The first member to be checked changes with the attempt, so that over two attempts everyone is checked.
        """
        text, start = settle.signed_bytes(), self._attempt * self._threshold % len(settle.members)
        for name in settle.members[start:] + settle.members[:start]:
            if len(self._signatures) == self._threshold:
                break
            if name in self._signatures:
                continue
            if self._roster.verifies(name, self._replies[name].signature, text):
                self._signatures[name] = self._replies[name].signature
            else:
                self.conduct.exclude(name, "its signature of the list of members is invalid")
        return self._signatures

    def take_reveal_reply(self, name: str, data: bytes) -> None:
        """Accept M6. Shares that match their hash count, even if other shares from the same member do not."""
        self._expect("revealed", name, self.survivors, self._reveal is not None)
        if name in self._revealed:
            raise BadArgument("revealed", f"{name} has already revealed")
        reply = RevealReply.from_bytes(data)
        self._check_context("revealed", name, reply.context)
        matching = {dealer: share for dealer, share in reply.shares.items() if self._was_dealt(dealer, name, share)}
        self._revealed[name] = {dealer: share for dealer, share in matching.items() if masks.is_field_element(share)}
        for dealer in matching.keys() - self._revealed[name].keys():
            self.conduct.exclude(dealer, "a share that it dealt is not an element of the field")
        if matching.keys() != set(self.survivors) - self._complaints.get(name, set()):
            self._exclude("revealed", name, "it did not reveal exactly the shares that it had accepted")

    def total(self) -> Words:
        """Return the sum over `survivors`, modulo 2^64, after all checks."""
        if self._reveal is None:
            raise BadArgument("total", "nothing has been revealed yet", "call reveal()")
        if len(self._revealed) < self._threshold:
            problem = f"{len(self._revealed)} of {len(self._names)} clients have revealed"
            raise Aborted("few", "reveal", f"{problem}: at least {self._threshold} are needed")
        members = self.survivors
        seeds = [seed for name in members if (seed := self._recover_self_seed(name)) is not None]
        if len(seeds) < len(members):
            liars = [name for name in members if name in self.conduct.excluded]
            suffix = f"; {', '.join(liars)} lied" if liars else ""
            raise Aborted(
                "share", "total", f"{len(members) - len(seeds)} of {len(members)} self seeds are lost{suffix}"
            )
        indices = {self._index[name] for name in members}
        pairs = {pair: seed for pair, seed in self._seeds.items() if pair[0] in indices and pair[1] not in indices}
        total = masks.unmask([self._uploads[name].words for name in members], seeds, pairs)
        check_count(total, len(members))
        return total

    def _recover_self_seed(self, name: str) -> bytes | None:
        """Recover a client's self seed from t valid shares; exclude the client if its commitment does not match."""
        shares = {
            self._index[revealer] + 1: dealt[name]
            for revealer, dealt in sorted(self._revealed.items())
            if name in dealt
        }
        if len(shares) < self._threshold:
            return None
        try:
            seed = masks.join_seed({point: shares[point] for point in sorted(shares)[: self._threshold]})
            if masks.commitment(seed, self._context) == self._uploads[name].commitments[self._index[name]]:
                return seed
        except Aborted:
            pass  # the shares do not represent a seed
        self.conduct.exclude(name, "the shares that it dealt do not yield the seed that it committed to")
        return None

    def _matching_members(self) -> list[str]:
        """Return the members that uploaded, except one of each pair whose commitments to their common seed differ."""
        uploaders = [name for name in self._names if name in self._uploads]
        disputed = [pair for pair in combinations(uploaders, 2) if self._differs(*pair)]
        self._disputants = {name for pair in disputed for name in pair}
        left_out = self.conduct.settle_disputes(disputed, len(self._names)) if disputed else set()
        return [name for name in uploaders if name not in left_out]

    def _recoverable_members(self, members: list[str]) -> list[str]:
        """Return the given members that are not proven liars, and whose seed t of them can open."""
        if self._complaints:
            self.conduct.judge_complaints(self._complaints, len(self._names))
        members = [name for name in members if name not in self.conduct.excluded]
        while self._complaints and (unrecoverable := self._unrecoverable(members)):
            members = [name for name in members if name not in unrecoverable]
        return members

    def _unrecoverable(self, members: list[str]) -> set[str]:
        """Return the given members for whose seed fewer than t of them have a usable share."""
        num_missing = Counter(dealer for name in members for dealer in self._complaints.get(name, ()))
        return {name for name in members if len(members) - num_missing[name] < self._threshold}

    def _was_dealt(self, dealer: str, name: str, share: bytes) -> bool:
        """Return whether a share matches the hash that its dealer sent for this member."""
        upload, index = self._uploads.get(dealer), self._index[name]
        return upload is not None and masks.share_hash(self._context, dealer, index, share) == upload.hashes[index]

    def _differs(self, first: str, second: str) -> bool:
        first_commitments, second_commitments = self._uploads[first].commitments, self._uploads[second].commitments
        return first_commitments[self._index[second]] != second_commitments[self._index[first]]

    def _pack_dealt_shares(self, name: str, dealers: list[str]) -> bytes:
        """Encode the encrypted shares that others dealt to a client, and their hashes."""
        index = self._index[name]
        uploads = {dealer: self._uploads[dealer] for dealer in dealers if dealer != name}
        sealed = [upload.sealed[index - (index > self._index[dealer])] for dealer, upload in uploads.items()]
        return pack_dealt(sealed, [upload.hashes[index] for upload in uploads.values()])

    def _exclude(self, kind: str, name: str, reason: str) -> None:
        self.conduct.exclude(name, reason)
        raise BadArgument(kind, f"{name} is excluded: {reason}")

    def _expect(self, kind: str, name: str, members: tuple[str, ...], is_open: bool) -> None:
        if not is_open or name not in members:
            raise BadArgument(kind, f"unexpected message from {name!r}: it is late, early, or from a stranger")

    def _check_context(self, kind: str, name: str, digest: bytes) -> None:
        if digest != self._context:
            raise BadArgument(kind, f"{name} replied to a different opening", "send the same bytes to all clients")


def check_count(total: Words, members: int) -> None:
    """Check that the masks cancel: every client adds 1 to the first word, so it must be the number of clients."""
    if int(total[0]) != members:
        raise Aborted("sum", "total", f"the masks of {members} clients do not cancel: one of them is wrong")
