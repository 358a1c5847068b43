"""A server that lies in every message it may send, against two clients that differ in their records alone.

Each step sends one message to both. An oracle, written down from the protocol and not from the code, says whether it
may be answered. Three things must hold at every step: nothing is answered, loaded or remembered that the oracle does
not allow; both clients say the same, byte for byte, but for the masked words; and that includes errors and crashes.
"""

import json
import random
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

from fedveil.errors import FedveilError
from fedveil.federation import client as client_module
from fedveil.federation.client import ClientSession, ClientState
from fedveil.federation.protocol import MaskedAnswer, Request, Step, read, write
from fedveil.secagg import Hello, Identity, Memory, Opening, Party, Policy, Roster, masks, party
from fedveil.secagg.identity import Digest, channel_key, sign_message, tag_message
from fedveil.secagg.messages import RevealReply, Settle, SettleReply, Upload, context, pack_dealt
from fedveil.wire import as_bytes, read_kind

NAMES = ("site-0", "site-1", "site-2", "site-3", "site-4")
VICTIM = NAMES[0]
RUNS = ("run one", "run two")
ROWS = (2, 8)
SERVER, STRANGER = Identity.new("server"), Identity.new("server")
IDENTITIES = {name: Identity.new(name) for name in NAMES}
ROSTER = Roster({name: identity.public() for name, identity in IDENTITIES.items()})
LIMITS = {"min_members": 4, "max_sums_per_run": 4, "max_sums_per_day": 6, "key_rounds": 5, "key_hours": 2}
POLICY = Policy(server=SERVER.public(), min_records=2, **LIMITS)
SIGNERS = ("stranger", "member", "nobody")
ROSTERS = ("four", "three", "two", "without", "twice", "forged", "old key")
FAULTS = ("exponent", "rows", "checks", "size", "batch", "stale", "model")
LIES = ("attempt again", "attempt back", "round again", "round back", *ROSTERS, *FAULTS, *SIGNERS)
SETTLE_LIES = ("same step", "later step", "a stranger", "short", "none", "all again", *SIGNERS)
RUN, LEFT = st.sampled_from(RUNS), st.sets(st.sampled_from(NAMES[1:]), min_size=1, max_size=2)


def threshold(n):
    return max(3, 2 * n // 3 + 1)


def crash():
    raise MemoryError("the record with number 17 does not fit")


INPUTS = torch.linspace(-1, 1, 24).reshape(6, 4).double()
LABELS = torch.tensor([0, 1, 0, 1, 0, 1])
RECORDS = {
    "ordinary": lambda: (INPUTS, LABELS),
    "other values": lambda: (INPUTS.flip(0) * 3, 1 - LABELS),
    "huge values": lambda: (INPUTS * 1e300, LABELS),
    "classes that the model does not have": lambda: (INPUTS, LABELS + 7),
    "a loader that crashes": crash,
    "a loader that ends the process": lambda: sys.exit("a record ended the process"),
}


def replace_entropy(patch):
    """Let masks and keys draw from one source; check words, which not every client computes, draw from another."""
    draw = random.Random(0)
    patch.setattr(masks.os, "urandom", draw.randbytes)
    patch.setitem(masks.split.__kwdefaults__, "draw", draw.randrange)
    generate = lambda: X25519PrivateKey.from_private_bytes(draw.randbytes(32))  # noqa: E731
    patch.setattr(X25519PrivateKey, "generate", staticmethod(generate))
    return draw


class Client:
    """A client whose records can be exchanged; it counts how often they are loaded."""

    def __init__(self, clock):
        self.memory, self.state, self.loads, self.records = Memory(), ClientState(), 0, "ordinary"
        self.party = Party(IDENTITIES[VICTIM], ROSTER, self.memory, policy=POLICY, clock=clock)

    def load(self):
        self.loads += 1
        return RECORDS[self.records]()

    def hear(self, message, own):
        """Its answer, or its error."""
        model = nn.Linear(4, 2, dtype=torch.float64)
        try:
            session = ClientSession(model, self.load, client=0, party=self.party, state=self.state)
            answer, self.state = session.reply(message, own), session.state
        except FedveilError as error:
            return error
        return answer


def public_part(answer, n):
    """What the server gets besides the masked words."""
    if isinstance(answer, FedveilError):
        return type(answer).__name__, str(answer)
    if read_kind(answer) == "step":
        return "step", answer
    size = 2 + sum(ROWS) + 2 * len(ROWS)
    found = read(answer, MaskedAnswer)
    sent = Upload.from_bytes(as_bytes("answer", found.tensors, "upload"), n, size)
    public = found.round, found.token, found.defence, len(answer)
    return *public, sent.context, sent.commitments, sent.hashes, sent.sealed


@dataclass
class Known:
    """What the oracle remembers of one run: that a client may answer depends on nothing else."""

    created: int
    key: bytes | None = None
    uses: int = 0
    attempt: int = -1
    round: int = -1
    revealed: int = -1
    sums: int = 0
    current: dict | None = None


class LyingServer(RuleBasedStateMachine):
    """Messages of a server that may do anything but break a signature."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.draw, self.now, self.steps = replace_entropy(self.patch), 1_800_000_000, 0
        self.clients = [Client(lambda: self.now), Client(lambda: self.now)]
        self.others = {n: Party(IDENTITIES[n], ROSTER, policy=replace(POLICY, key_rounds=10**6)) for n in NAMES[1:]}
        self.runs, self.ended, self.opened, self.day = {}, set(), {}, (0, 0)
        self.last, self.hellos, self.tokens, self.past = None, {}, 0, {}
        self.key = X25519PrivateKey.from_private_bytes(b"k" * 32)

    def teardown(self):
        self.patch.undo()

    @initialize(records=st.sampled_from([name for name in RECORDS if name != "ordinary"]))
    def give_the_clients_other_records(self, records):
        self.pair = ("ordinary", records)
        self.say_hello(RUNS[0], "server")

    def mark(self, message, signer, own, run):
        """A signature or, every other time, a tag: the server's, a stranger's, a member's, or none."""
        self.steps += 1
        if signer == "nobody":
            return own
        if self.steps % 2 or run not in self.hellos:
            known = {"server": SERVER, "stranger": STRANGER, "member": IDENTITIES["site-1"]}
            return sign_message(known[signer], message, own)
        private = self.key if signer != "stranger" else X25519PrivateKey.from_private_bytes(b"s" * 32)
        key = self.hellos[run].key if signer != "member" else self.others["site-1"].hello(run).key
        return tag_message(channel_key(private, key, run), Digest.compute(message).combine(), own)

    def send(self, message, signer="server", own=b"", records=False, n=5, run=None):
        """Send a message to both clients; returns what both of them said."""
        own = self.mark(message, signer, own, run)
        said = []
        self.before = self.clients[0].memory.to_bytes()
        for client, name in zip(self.clients, self.pair if records else ("ordinary", "other values"), strict=True):
            self.draw.seed(self.steps)
            client.records = name
            said.append(client.hear(message, own))
        assert public_part(said[0], n) == public_part(said[1], n)
        assert self.clients[0].memory.to_bytes() == self.clients[1].memory.to_bytes()
        assert self.clients[0].loads == self.clients[1].loads
        return said[0]

    def refused(self, said, reasons=()):
        """Nothing was answered or remembered."""
        assert isinstance(said, FedveilError), said
        assert self.clients[0].memory.to_bytes() == self.before
        assert not reasons or getattr(said, "reason", "argument") in reasons, said

    def expired(self, run):
        known = self.runs[run]
        return known.uses >= POLICY.key_rounds or self.now - known.created >= 3600 * POLICY.key_hours

    @rule(run=RUN, signer=st.sampled_from(["server", "server", "stranger", "member", "nobody"]))
    def say_hello(self, run, signer):
        body = b"c" * 16 + self.key.public_key().public_bytes_raw()
        said = self.send(write(Step.make(run, "hello", body)), signer)
        if signer != "server":
            return self.refused(said, ("server",))
        if run in self.ended:
            return self.refused(said, ("run",))
        for other in [name for name in self.runs if self.outlived(name)]:
            self.runs[other].current = None  # its key is gone
        old = self.runs.get(run)
        if old is None or self.expired(run):
            known = old or Known(self.now)
            self.runs[run] = replace(known, created=self.now, key=None, uses=0, current=None)
        hello = Hello.from_values(json.loads(read(said, Step).body))
        assert ROSTER.verifies(VICTIM, hello.signature, Hello.signed_bytes(run, VICTIM, hello.key))
        assert self.runs[run].key in (None, hello.key)
        self.runs[run].key = hello.key
        self.hellos[run] = hello
        return None

    def outlived(self, run):
        return self.now - self.runs[run].created >= 3600 * POLICY.key_hours

    @rule(run=RUN, signer=st.sampled_from(["server", "stranger"]), unlikely=st.integers(0, 5))
    def end_a_run(self, run, signer, unlikely):
        if unlikely:
            return
        said = self.send(write(Step.make(run, "end", b"")), signer, run=run if run in self.runs else None)
        if signer != "server" or (isinstance(said, FedveilError) and run in self.runs and self.outlived(run)):
            self.refused(said, ("server",))  # a tag under a key that is gone proves nothing
        elif run in self.runs:
            del self.runs[run]
            self.ended.add(run)

    @rule(hours=st.sampled_from([0, 1, 3, 30]), unlikely=st.integers(0, 3))
    def let_time_pass(self, hours, unlikely):
        self.now += 0 if unlikely else 3600 * hours

    @rule(junk=st.binary(max_size=40), signer=st.sampled_from(["server", "nobody"]))
    def send_garbage(self, junk, signer):
        self.refused(self.send(junk, signer))

    @rule(
        run=RUN,
        lie=st.sampled_from(["", *LIES]),
        exponent=st.integers(-32, 96),
        weight=st.sampled_from([0.0, 1.0, 1e150]),
        whole=st.booleans(),
    )
    def ask(self, run, lie, exponent, weight, whole):
        """An ask, right but for one lie."""
        roster, fault = lie if lie in ROSTERS else "all", lie if lie in FAULTS else ""
        signer, known = lie if lie in SIGNERS else "server", self.runs.get(run)
        attempt = max(0, (known.attempt if known else 0) + {"attempt again": 0, "attempt back": -1}.get(lie, 1))
        round_ = max(0, (known.round if known else 0) + {"round again": 0, "round back": -1}.get(lie, 1))
        hellos = self.roster(run, roster)
        opening = Opening(run, round_, attempt, tuple(hellos), (exponent,) * 2, ROWS, checks=fault != "checks")
        if fault == "exponent":
            opening = replace(opening, exponents=(97, -33))
        if fault in ("rows", "size"):
            opening = replace(opening, rows=(2, 8, 1) if fault == "rows" else (2, 10**7))
        self.tokens += fault != "stale"
        model = nn.Linear(4, 3 if fault == "model" else 2, dtype=torch.float64)
        nn.init.constant_(model.weight, weight)
        nn.init.zeros_(model.bias)
        tensors = {f"parameter/{name}": p.detach() for name, p in model.named_parameters()}
        values = {"trainable": ["weight", "bias"], "training": [""]}
        size, secure, whole = 1 if fault == "batch" else 6, opening.values(), whole and fault != "batch"
        about = "plain", {}, "squared_error", {}, whole, size
        ask = Request(run, round_, str(self.tokens), *about, 0, {}, secure, values, tensors)
        message, loads = write(ask), self.clients[0].loads
        said = self.send(message, signer, records=True, n=len(hellos), run=run if known else None)
        old = self.last is not None and self.last[0] == run and (round_ < self.last[1] or self.last[2] == self.tokens)
        wrong = signer != "server" or old or fault in ("exponent", "rows", "checks", "size", "batch")
        allowed = known is not None and not self.expired(run) and roster in ("all", "four")
        allowed = allowed and attempt > known.attempt and round_ > known.revealed and round_ >= known.round
        allowed = allowed and known.sums < POLICY.max_sums_per_run and self.sums_today() < POLICY.max_sums_per_day
        if wrong or not allowed:
            self.refused(said)
            assert self.clients[0].loads == loads
            return
        known.attempt, known.round, known.uses = attempt, round_, known.uses + 1
        names = tuple(hello.name for hello in hellos)
        bound = context(opening, Digest.compute(message).combine())
        subject = client_module.digest_subject(ask, message, Digest.compute(message).body)
        known.current = {"context": bound, "names": names, "members": names, "step": -1, "subject": subject}
        if fault == "model":
            assert isinstance(said, FedveilError)
            assert self.clients[0].loads == loads
            return
        assert read_kind(said) == "maskedanswer"
        assert self.clients[0].loads == loads + 1
        self.last = (run, round_, self.tokens)

    def roster(self, run, kind):
        own = self.hellos.get(run) or Hello(run, VICTIM, bytes(range(32)), bytes(64))
        others = [party.hello(run) for party in self.others.values()]
        if kind == "without":
            return others
        if kind == "twice":
            return [own, *others, others[0]]
        if kind == "forged":
            return [own, replace(others[0], key=b"f" * 32), *others[1:]]
        if kind == "old key":
            key = b"o" * 32
            return [Hello(run, VICTIM, key, IDENTITIES[VICTIM].sign(Hello.signed_bytes(run, VICTIM, key))), *others]
        return [own, *others][: {"all": 5, "four": 4, "three": 3, "two": 2}[kind]]

    @rule(
        run=RUN,
        roster=st.sampled_from(["", "", "four", "three"]),
        until=st.sampled_from(["ask", "settle", "reveal", "reveal"]),
        weight=st.sampled_from([1.0, 1.0, 1.0, *map(float, range(2, 20))]),  # often the same broadcast
        whole=st.booleans(),
    )
    def follow_the_protocol(self, run, roster, until, weight, whole):
        """Up to some step, so that lies meet a client in every state."""
        if run not in self.runs or self.expired(run):
            self.say_hello(run, "server")
        self.ask(run, roster, 8, weight, whole)
        if until != "ask":
            self.settle(run, "", set())
        if until == "reveal":
            self.reveal(run, "")

    @rule(run=RUN, lie=st.sampled_from(["same step", "later step", "all again"]), left=LEFT)
    def settle_twice(self, run, lie, left):
        """Two lists one after the other, the second with a lie about its place or its members."""
        self.follow_the_protocol(run, "", "ask", 1.0, True)
        self.settle(run, "", {min(left)} if len(left) > 1 or lie == "all again" else set())
        self.settle(run, lie, left)

    @rule(run=RUN, lie=st.sampled_from([*LIES[:4], "old key"]), until=st.sampled_from(["ask", "reveal"]))
    def ask_twice(self, run, lie, until):
        """An ask that repeats an earlier one, or that comes after the end of the client's key."""
        self.follow_the_protocol(run, "", until, 1.0, True)
        if lie == "old key":
            self.let_time_pass(3, 0)
        self.ask(run, "" if lie == "old key" else lie, 8, 1.0, True)

    def sums_today(self):
        return self.day[1] if self.now // 86_400 == self.day[0] else 0

    @rule(run=RUN, lie=st.sampled_from(["", "", *SETTLE_LIES]), leave_out=st.sets(st.sampled_from(NAMES), max_size=3))
    def settle(self, run, lie, leave_out):
        """A list of members, right but for one lie and for whom it leaves out."""
        signer, own = (lie if lie in SIGNERS else "server"), lie if lie in ("short", "none") else "right"
        known = self.runs.get(run)
        now = known.current if known else None
        bound = (now or self.past.get(run) or {"context": bytes(32)})["context"]
        step = max(0, (now["step"] if now else -1) + {"same step": 0, "later step": 2}.get(lie, 1))
        members = tuple(name for name in (now["members"] if now else NAMES) if name not in leave_out)
        members = tuple(now["names"]) if now and lie == "all again" else members
        members += ("zoe",) if lie == "a stranger" else ()
        count = max(0, len(members) - 1)
        right = pack_dealt([bytes(94)] * count, [bytes(32)] * count)
        extra = {"right": right, "short": b"x" * 9, "none": b""}[own]
        message = Settle(bound, step, members).to_bytes()
        step_message = write(Step.make(run, "settle", message))
        said = self.send(step_message, signer, own=extra, run=run if known else None)
        allowed = signer == "server" and now is not None and step == now["step"] + 1
        allowed = allowed and set(members) <= set(now["members"]) and VICTIM in members
        allowed = allowed and (now["step"] < 0 or len(members) < len(now["members"]))
        allowed = allowed and len(members) >= threshold(len(now["names"])) and (step > 0 or own == "right")
        if not allowed:
            return self.refused(said)
        answer = SettleReply.from_bytes(read(said, Step).body, len(now["names"]) - len(members))
        assert ROSTER.verifies(VICTIM, answer.signature, Settle(bound, step, members).signed_bytes())
        now["step"], now["members"] = step, members
        return None

    @rule(run=RUN, lie=st.sampled_from(["", "one fewer", "none", "of another list", "step", "members", *SIGNERS]))
    def reveal(self, run, lie):
        """Signatures on the last list, right but for one lie."""
        signer, other = (lie if lie in SIGNERS else "server"), lie if lie in ("step", "members") else ""
        signatures = lie if lie in ("one fewer", "none", "of another list") else "enough"
        known = self.runs.get(run)
        now = known.current if known else None
        nothing = {"context": bytes(32), "members": NAMES, "names": NAMES, "step": 0, "subject": b""}
        told = now or self.past.get(run) or nothing
        members = told["members"][:-1] if other == "members" else told["members"]
        settle = Settle(told["context"], max(0, told["step"]) + (other == "step"), tuple(members))
        needed = threshold(len(told["names"])) - 1
        signers = [name for name in members if name != VICTIM][: needed - (signatures == "one fewer")]
        covered = replace(settle, step=settle.step + (signatures == "of another list")).signed_bytes()
        signed = {name: IDENTITIES[name].sign(covered) for name in signers if signatures != "none"}
        data = party.Reveal(settle, signed).to_bytes()
        message = write(Step.make(run, "reveal", data))
        said = self.send(message, signer, run=run if known else None)
        allowed = signer == "server" and now is not None and now["step"] >= 0 and not other and signatures == "enough"
        allowed = allowed and known.sums < POLICY.max_sums_per_run and self.sums_today() < POLICY.max_sums_per_day
        allowed = allowed and self.opened.get(now["subject"], set(members)) == set(members)
        if not allowed:
            return self.refused(said)
        found = RevealReply.from_bytes(read(said, Step).body)
        assert set(found.shares) <= set(members)
        today = self.now // 86_400
        self.day = today, self.sums_today() + 1
        known.sums, known.revealed, known.current = known.sums + 1, known.round, None
        self.past[run] = now
        self.opened[now["subject"]] = set(members)
        return None
