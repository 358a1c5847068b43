"""Clients with keys, and attempts in which some of them vanish."""

import hashlib

import numpy as np

from fedveil.errors import BadArgument
from fedveil.secagg import Identity, Memory, Opening, Party, Policy, Roster, Tally
from fedveil.secagg.messages import Upload

STAGES = ("upload", "settle", "reveal")
SIZE = 3  # words, where their number does not matter
DIGEST = hashlib.sha256(b"the broadcast").digest()


def upload(party, opening, digest, words, subject=None):
    """M2: admission, then the words under masks. By default every attempt is about another broadcast."""
    subject = subject or hashlib.sha256(repr((opening.run, opening.attempt)).encode()).digest()
    return party.upload(party.admit(opening, digest, subject), words)


def words(*values):
    """A client's vector: 1, then values modulo 2^64."""
    return np.array([1, *[value % 2**64 for value in values]], np.uint64)


class Group:
    """n clients that know one another, and their hellos for one run."""

    def __init__(self, n, run="a run", **policy):
        self.run, self.policy = run, Policy(**{"key_rounds": 2**40, **policy})
        self.names = [f"c{place}" for place in range(n)]
        identities = [Identity.new(name) for name in self.names]
        self.roster = Roster({identity.name: identity.public() for identity in identities})
        self.identities = dict(zip(self.names, identities, strict=True))
        self.memories = {name: Memory() for name in self.names}
        self.parties = {
            name: Party(self.identities[name], self.roster, self.memories[name], policy=self.policy)
            for name in self.names
        }
        self.hellos = {name: party.hello(run) for name, party in self.parties.items()}
        self.attempt = -1

    def opening(self, *, attempt=None, round=None, names=None, size=SIZE):
        """An opening for vectors of `size` words; by default the next attempt, in a new round, with everyone."""
        self.attempt = self.attempt + 1 if attempt is None else attempt
        roster = tuple(self.hellos[name] for name in (names or self.names))
        number = self.attempt if round is None else round
        return Opening(self.run, number, self.attempt, roster, (8,), (size - 2,), checks=False)

    def vectors(self, size=SIZE, seed=0):
        """Random words of every client."""
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, 2**64, (len(self.names), size), np.uint64, endpoint=False)
        drawn[:, 0] = 1
        return dict(zip(self.names, drawn, strict=True))

    def uploads(self, opening, vectors, digest=DIGEST, subject=None):
        """M2 of everyone in the opening."""
        return {name: upload(self.parties[name], opening, digest, vectors[name], subject) for name in opening.names}

    def snapshot(self):
        return {name: memory._text for name, memory in self.memories.items()}

    def restore(self, texts):
        for name, text in texts.items():
            self.memories[name]._text = text


def take(taken, name, data, refused):
    """Give the server an answer; with a list, refusals go there."""
    try:
        taken(name, data)
    except BadArgument as error:
        if refused is None:
            raise
        refused.append(str(error))


def settle_all(group, tally, gone=(), refused=None):
    """Settle, without those who are gone, until all who are left agree; returns how many steps that took."""
    steps = 0
    while not tally.has_agreement():
        common, own = tally.settle()
        steps += 1
        for name in own:
            if name not in gone:
                take(tally.take_settle_reply, name, group.parties[name].settle(common, own[name]), refused)
    return steps


def reveal_all(group, tally, gone=(), refused=None):
    """M5 and the M6 of those who are not gone."""
    message = tally.reveal()
    for name in tally.survivors:
        if name not in gone:
            take(tally.take_reveal_reply, name, group.parties[name].reveal(message), refused)


def attempt(group, opening, sent, vanish=None, digest=DIGEST):
    """A whole attempt, from uploads that were made; clients vanish before the stage named in `vanish`."""
    vanish = vanish or {}
    gone = {stage: {name for name, at in vanish.items() if STAGES.index(at) <= STAGES.index(stage)} for stage in STAGES}
    tally = Tally(opening, digest, group.roster)
    for name, data in sent.items():
        if name not in gone["upload"]:
            tally.take_upload(name, data)
    settle_all(group, tally, gone["settle"])
    reveal_all(group, tally, gone["reveal"])
    return tally


def summed(vectors, names):
    """The sum of clients' words in Python's integers, modulo 2^64."""
    rows = [vectors[name] for name in names]
    return np.array([sum(int(row[i]) for row in rows) % 2**64 for i in range(len(rows[0]))], np.uint64)


class Attempt:
    """An attempt of n clients, or of a group, all of whom have uploaded but the last `absent`."""

    def __init__(self, n, change=None, conduct=None, absent=0):
        self.group = n if isinstance(n, Group) else Group(n)
        self.opening, self.vectors = self.group.opening(), self.group.vectors(SIZE)
        self.sent = self.group.uploads(self.opening, self.vectors)
        self.tally = Tally(self.opening, DIGEST, self.group.roster, conduct)
        for name in self.group.names[: len(self.sent) - absent]:
            upload = Upload.from_bytes(self.sent[name], len(self.sent), SIZE)
            self.tally.take_upload(name, (change(name, upload) if change else upload).to_bytes())

    def revealed(self, gone=()):
        """M6 by name."""
        message = self.tally.reveal()
        return {name: self.group.parties[name].reveal(message) for name in self.tally.survivors if name not in gone}

    def finish(self, refused=None):
        """Settle and reveal with everyone; returns the number of steps of settling."""
        steps = settle_all(self.group, self.tally, refused=refused)
        reveal_all(self.group, self.tally, refused=refused)
        return steps

    def answers(self, common, own):
        """M4 by name."""
        return {name: self.group.parties[name].settle(common, own[name]) for name in own}

    def exact(self):
        return np.array_equal(self.tally.total(), summed(self.vectors, self.tally.survivors))
