"""What a client refuses. Each function raises Aborted, with its reason, or lets a message pass.

With n members of an attempt, t = max(3, floor(2n/3) + 1) of them must agree, and t shares open a self seed. Clients
compute t themselves. If c of the others tell the server all they know, then only sums over at least t - c honest
clients open, provided that c <= t - 2 and 2t > n + c. `colluders` is the largest such c: 1 for n = 4, 3 for n = 10.
The proof, and a check over all strategies of a server with up to 6 clients, are in tests/secagg/test_promise.py.

At least 3 members: with 2, a client's vector is the sum less that of the other. With 3 nobody may be late.

Differs from the protocol on paper: since the server chooses who takes part, it could put its colluders into a roster so
small that they are too many for it (2 of 4 open a single client). A client's policy says how many it withstands, and
smaller rosters are refused.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from fedveil.checks import whole
from fedveil.errors import Aborted
from fedveil.secagg.identity import Roster
from fedveil.secagg.messages import Hello, Opening, Reveal, Settle
from fedveil.secagg.policy import Policy

if TYPE_CHECKING:
    from fedveil.secagg.memory import Current, Kept, State

LEAST = 3
REASONS = {
    "server": "the message is not signed by the server that the client's policy names",
    "run": "the client has no key for this run, the run has ended, or the opening is for another run",
    "key": "the client's key for this run is due to be replaced",
    "policy": "the client's policy does not allow it: too few records or members, or too many sums",
    "repeat": "a sum on the same broadcast was opened over other members",
    "full": "the client's memory is full of runs that have ended",
    "roster": "the roster names a stranger, leaves the client out, or a key in it is not its owner's",
    "few": "too few members take part, or are left, to hide one of them",
    "attempt": "the attempt is not above the last one, or not the one under way",
    "round": "the round was revealed already, or is behind one that was",
    "step": "a step of settling was left out or repeated",
    "members": "the members left are not inside the last ones, or leave the client out",
    "signatures": "too few members have signed the same list of those left",
    "busy": "another process uses the client's memory",
    "share": "the shares of a client's seed do not fit",
    "sum": "the masks do not cancel",
}
"""Why secure aggregation stops, by `Aborted.reason`."""


def threshold(n: int) -> int:
    """How many of n members must agree, and how many shares open a seed: more than two thirds, and at least 3.

    >>> [threshold(n) for n in (3, 4, 5, 10, 50)]
    [3, 3, 4, 7, 34]
    """
    fix = f"use at least {LEAST} clients: a sum over fewer shows a client to the other"
    return max(3, 2 * whole("secure aggregation", "the number of clients", n, LEAST, fix) // 3 + 1)


def colluders(n: int) -> int:
    """How many of n members may collude with the server before a single client could be opened.

    >>> [colluders(n) for n in (3, 4, 5, 10, 50)]
    [1, 1, 2, 3, 17]
    """
    t = threshold(n)
    return min(t - 2, 2 * t - n - 1)


def liars(n: int) -> int:
    """How many members may lie for the server to tell who does: no more than may vanish, and at least 1.

    >>> [liars(n) for n in (3, 4, 5, 10, 50)]
    [1, 1, 1, 3, 16]
    """
    return max(1, n - threshold(n))


def enough(n: int, policy: Policy) -> None:
    """The roster is large enough for the client's policy."""
    if n < max(LEAST, policy.min_members) or colluders(n) < policy.colluders:
        least = max(LEAST, policy.min_members)
        what = f"{n} members are too few: at least {least}, and enough to withstand {policy.colluders} colluders"
        raise Aborted("few", "opening", what)


def alive(kept: "Kept", policy: Policy, now: int) -> None:
    """The key of a run is not due to be replaced."""
    if expired(kept, policy, now):
        raise Aborted("key", "opening", "this client's key for the run is due to be replaced", "ask for its hello")


def expired(kept: "Kept", policy: Policy, now: int) -> bool:
    """Whether a key was used often enough, or is old enough, to be replaced."""
    return not kept.key or kept.uses >= policy.key_rounds or not 0 <= now - kept.created < 3600 * policy.key_hours


def within_budget(state: "State", kept: "Kept", policy: Policy, day: int) -> None:
    """The client may help to open another sum."""
    for what, most, count in (
        ("run", policy.max_sums_per_run, kept.sums),
        ("day", policy.max_sums_per_day, state.sums_on(day)),
    ):
        if count >= most:
            raise Aborted("policy", "opening", f"this client opens at most {most:,} sums per {what}")


def not_repeated(state: "State", subject: str, members: str) -> None:
    """No sum on the same broadcast was opened over other members: their difference would show who is missing."""
    if any(over != members for over in state.members_of(subject)):
        what = "this client has opened a sum on the same broadcast over other members"
        raise Aborted("repeat", "reveal", what, "continue with the same members, or with another model")


def known(opening: Opening, roster: Roster, verified: set[Hello]) -> None:
    """Everyone in the opening is in the client's own roster, once, with a key that its owner signed for this run."""
    keys = {hello.key for hello in opening.roster}
    if not len(set(opening.names)) == len(keys) == len(opening.roster):
        raise Aborted("roster", "opening", "it names a member or a key twice")
    for hello in opening.roster:
        if hello.run != opening.run:
            raise Aborted("run", "opening", f"the key of {hello.name} is for another run")
        if hello in verified:
            continue
        if hello.name not in roster.names:
            raise Aborted("roster", "opening", f"{hello.name} is not in this client's roster")
        if not roster.verifies(hello.name, hello.signature, Hello.signed(hello.run, hello.name, hello.key)):
            raise Aborted("roster", "opening", f"the key of {hello.name} is not signed by {hello.name}")
        verified.add(hello)


def included(opening: Opening, name: str, key: bytes) -> None:
    """The client itself is in the opening, with its present key."""
    if not any((hello.name, hello.key) == (name, key) for hello in opening.roster):
        raise Aborted("roster", "opening", f"it leaves out {name}, or has an old key of {name}")


def new_attempt(kept: "Kept", opening: Opening) -> None:
    """The attempt is above all that this key has seen: no mask occurs twice."""
    if opening.attempt <= kept.attempt:
        raise Aborted("attempt", "opening", f"attempt {opening.attempt} is not above the last one, {kept.attempt}")


def new_round(kept: "Kept", opening: Opening) -> None:
    """The round is not behind the last one, and nothing of it was revealed: no two sums of one round open."""
    if opening.round <= kept.revealed:
        raise Aborted("round", "opening", f"round {opening.round} is not above the one last revealed, {kept.revealed}")
    if opening.round < kept.round:
        raise Aborted("round", "opening", f"round {opening.round} is behind the last one, {kept.round}")


def next_step(current: "Current", settle: Settle) -> None:
    """Steps of settling come one by one."""
    if settle.step != current.step + 1:
        raise Aborted("step", "settle", f"step {settle.step} does not follow step {current.step}")


def inside(current: "Current", members: Collection[str]) -> None:
    """Nobody comes back: those left are inside those who were left before, and after the first step fewer."""
    if current.step >= 0 and len(members) >= len(current.members):
        raise Aborted("members", "settle", "a further step must leave fewer members")
    if not set(members) <= set(current.members):
        raise Aborted("members", "settle", "it names a member that was dropped, or a stranger")


def many_left(current: "Current", members: Collection[str], name: str) -> None:
    """At least t are left, this client among them."""
    if name not in members:
        raise Aborted("members", "settle", "it leaves this client out")
    least = threshold(len(current.names))
    if len(members) < least:
        raise Aborted("few", "settle", f"{len(members)} of {len(current.names)} members are left: at least {least}")


def agreed(current: "Current", reveal: Reveal, roster: Roster, name: str) -> None:
    """At least t of those left, this client among them, have signed the list that it signed last."""
    if (reveal.settle.step, reveal.settle.members) != (current.step, current.members):
        raise Aborted("members", "reveal", "it is not about the members that this client agreed to last")
    enough_signed(current, reveal, roster, name)


def enough_signed(current: "Current", reveal: Reveal, roster: Roster, name: str) -> None:
    """At least t - 1 others of those left have signed the same context, step and members as this client."""
    text, least = reveal.settle.signed(), threshold(len(current.names))
    good = 1  # its own, which it need not check
    for other in current.members:
        if other != name and other in reveal.signatures and good < least:
            good += roster.verifies(other, reveal.signatures[other], text)
    if good < least:
        raise Aborted("signatures", "reveal", f"{good} members have signed it: at least {least}")
