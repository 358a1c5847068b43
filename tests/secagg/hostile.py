"""A server that does what it likes: it shows each client what it wants, and keeps all that comes back."""

from collections import defaultdict

from tests.secagg.group import upload

from fedveil.errors import BadArgument, FedveilError
from fedveil.secagg import masks, threshold
from fedveil.secagg.masks import join_seed
from fedveil.secagg.messages import Reveal, RevealReply, Settle, SettleReply, Upload, context, pack_dealt


class Hostile:
    """Everything that a hostile server knows of one attempt.

    Args:
        group: the clients.
        opening: of the attempt.
        colluders: clients that tell it everything.
    """

    def __init__(self, group, opening, colluders=()):
        self.group, self.opening, self.names, self.colluders = group, opening, opening.names, colluders
        self.sent, self.contexts = {}, {}
        self.seeds = {}  # by the names of a pair, in order
        self.shares = defaultdict(dict)  # dealer -> {place: share}
        self.signatures = defaultdict(dict)  # what was signed -> {name: signature}
        self.refused = []  # reasons

    def upload(self, name, digest, words, opening=None):
        opening = opening or self.opening
        data = self.ask(name, lambda party: upload(party, opening, digest, words))
        if data:
            self.sent[name] = Upload.from_bytes(data, len(self.names), len(words))
            self.contexts[name] = context(opening, digest)

    def ask(self, name, question):
        try:
            return question(self.group.parties[name])
        except FedveilError as error:
            self.refused.append(getattr(error, "reason", "argument"))
            return None

    def sealed(self, dealer, name):
        """The share that a dealer's upload holds for a client."""
        place, own = self.names.index(name), self.names.index(dealer)
        return self.sent[dealer].sealed[place - (place > own)]

    def settle(self, name, step, members, replaced=None):
        """Show a client a list of members; shares of other attempts go in as `replaced`, by dealer."""
        settle = Settle(self.contexts[name], step, tuple(members))
        dealt = [(replaced or {}).get(d) or self.sealed(d, name) for d in members if d != name] if step == 0 else []
        known = [self.sent[dealer].hashes[self.names.index(name)] for dealer in members if dealer != name]
        own = pack_dealt(dealt, known) if step == 0 else b""
        data = self.ask(name, lambda party: party.settle(settle.to_bytes(), own))
        if data:
            outside = [other for other in self.names if other not in members]
            answer = SettleReply.from_bytes(data, len(outside))
            self.signatures[settle.signed_bytes()][name] = answer.signature
            for other, seed in zip(outside, answer.seeds, strict=True):
                self.seeds[tuple(sorted((name, other)))] = seed

    def reveal(self, name, step, members):
        """Show a client the signatures that there are for a list of members, those of colluders too."""
        settle = Settle(self.contexts[name], step, tuple(members))
        signed = settle.signed_bytes()
        bought = {who: self.group.identities[who].sign(signed) for who in self.colluders}
        reveal = Reveal(settle, self.signatures[signed] | bought)
        data = self.ask(name, lambda party: party.reveal(reveal.to_bytes()))
        if data:
            for dealer, share in RevealReply.from_bytes(data).shares.items():
                self.shares[dealer][self.names.index(name) + 1] = share

    def buy(self, victim):
        """What colluders know of a victim: pair seeds with it, and its shares."""
        bound = self.contexts[victim]
        for name in self.colluders:
            with self.group.memories[name].turn() as turn:
                pair = masks.agree(turn.state.runs[self.group.run].private(), self.group.hellos[victim].key)
            self.seeds[tuple(sorted((name, victim)))] = masks.pair_seed(pair, bound, name, victim)
            share = masks.unseal(self.sealed(victim, name), pair, bound, victim, name)
            self.shares[victim][self.names.index(name) + 1] = share

    def own_seed(self, victim):
        t = threshold(len(self.names))
        held = dict(sorted(self.shares[victim].items())[:t])
        return join_seed(held) if len(held) == t else None

    def peel(self, victim, own=None, seeds=None):
        """The victim's words without every mask that is known; None if some are not."""
        seeds, own = seeds or self.seeds, own or self.own_seed(victim)
        place = self.names.index(victim)
        pairs = {(place, i): seeds.get(tuple(sorted((victim, n)))) for i, n in enumerate(self.names) if n != victim}
        if own is None or None in pairs.values():
            return None
        return masks.unmask([self.sent[victim].words], [own], pairs)


def refuses(call, *arguments):
    """The reason for which a call is refused."""
    try:
        call(*arguments)
    except BadArgument:
        return "argument"
    except FedveilError as error:
        return error.reason
    raise AssertionError("it was accepted")
