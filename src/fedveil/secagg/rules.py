"""The rules that decide whether a client refuses a message. Each check raises Aborted with its reason, or returns None.

In an attempt with n members, t = max(3, floor(2n/3) + 1) of them must agree, and t shares open a self seed. Clients
compute t themselves. If c of the others reveal all they know to the server, only sums over at least t - c honest
clients can be opened, provided that c <= t - 2 and 2t > n + c. `colluders` is the largest such c: 1 for n = 4, 3 for n
= 10. The proof, and a check over all strategies of a server with up to 6 clients, are in tests/secagg/test_promise.py.

There are at least 3 members: with 2, each could subtract its own vector from the sum. With 3, nobody may drop out.

One rule is not in the published protocol: since the server chooses who takes part, it could put its colluders into a
roster that is too small to withstand them (2 of 4 open a single client). A client's policy sets how many colluders a
roster must withstand, and smaller rosters are refused.
"""

from collections.abc import Collection

from fedveil.checks import check_count
from fedveil.errors import Aborted
from fedveil.secagg.identity import Roster
from fedveil.secagg.memory import Current, RunMemory, State
from fedveil.secagg.messages import Hello, Opening, Reveal, Settle
from fedveil.secagg.policy import Policy

MIN_MEMBERS = 3
REASONS = {
    "server": "the message is not signed by the server in the client's policy",
    "run": "the client has no key for this run, the run has ended, or the opening is for another run",
    "key": "the client's key for this run must be replaced",
    "policy": "the client's policy does not allow this sum: too few records or members, too many sums, or weak privacy",
    "budget": "one more round would exceed the privacy budget of the client's data set",
    "repeat": "a sum on the same broadcast was opened over other members",
    "full": "the table of runs in the client's memory is full",
    "roster": "the roster contains a stranger or an invalid key, or does not contain the client",
    "few": "too few members take part, or remain, to hide each of them",
    "attempt": "the attempt is not later than the previous one, or is not the current one",
    "round": "the round has already been revealed, or is earlier than the previous one",
    "step": "a step of settling was skipped or repeated",
    "members": "the remaining members are not a subset of the previous ones, or do not include the client",
    "signatures": "too few members have signed the same list of members",
    "busy": "another thread or process is using the client's memory",
    "share": "the shares of a client's seed do not match",
    "sum": "the masks do not cancel",
}
"""The reasons why secure aggregation stops, keyed by `Aborted.reason`."""


def threshold(n: int) -> int:
    """Return how many of n members must agree, and how many shares open a seed: more than two thirds, at least 3.

    >>> [threshold(n) for n in (3, 4, 5, 10, 50)]
    [3, 3, 4, 7, 34]
    """
    fix = f"use at least {MIN_MEMBERS} clients: with two, each could compute the other's vector from the sum"
    return max(3, 2 * check_count("secure aggregation", "the number of clients", n, MIN_MEMBERS, fix) // 3 + 1)


def colluders(n: int) -> int:
    """Return how many of n members may collude with the server without opening a single client.

    >>> [colluders(n) for n in (3, 4, 5, 10, 50)]
    [1, 1, 2, 3, 17]
    """
    t = threshold(n)
    return min(t - 2, 2 * t - n - 1)


def liars(n: int) -> int:
    """Return how many of n members can lie and still be identified: the number that may drop out, at least 1.

    >>> [liars(n) for n in (3, 4, 5, 10, 50)]
    [1, 1, 1, 3, 16]
    """
    return max(1, n - threshold(n))


def check_roster_size(n: int, policy: Policy) -> None:
    """Require a roster that is large enough for the client's policy."""
    if n < policy.min_members or colluders(n) < policy.colluders:
        requirement = f"at least {policy.min_members} are needed, and enough to withstand {policy.colluders} colluders"
        raise Aborted("few", "opening", f"{n} members are too few: {requirement}")


def needs_new_key(run: RunMemory, policy: Policy, now: int) -> bool:
    """Return whether a run's key is missing, used up or expired, and must be replaced."""
    return not run.key or run.uses >= policy.key_rounds or not 0 <= now - run.created < 3600 * policy.key_hours


def check_budget(state: State, run: RunMemory, policy: Policy, day: int) -> None:
    """Require that the client's policy allows it to open another sum."""
    limits = (run.sums, policy.max_sums_per_run, "run"), (state.count_sums(day), policy.max_sums_per_day, "day")
    for count, maximum, period in limits:
        if count >= maximum:
            raise Aborted("policy", "opening", f"this client opens at most {maximum:,} sums per {period}")


def check_same_members(state: State, subject: str, members: str) -> None:
    """Refuse a second sum on the same broadcast over other members: their difference would expose other members."""
    if any(digest != members for digest in state.opened_members(subject)):
        problem = "this client has opened a sum on the same broadcast over other members"
        raise Aborted("repeat", "reveal", problem, "continue with the same members, or with another model")


def check_roster(opening: Opening, roster: Roster, verified: set[Hello]) -> None:
    """Require each member to be in the client's own roster, once, with a key that the member signed for this run."""
    keys = {hello.key for hello in opening.roster}
    if not len(set(opening.names)) == len(keys) == len(opening.roster):
        raise Aborted("roster", "opening", "it lists a member or a key twice")
    for hello in opening.roster:
        if hello.run != opening.run:
            raise Aborted("run", "opening", f"the key of {hello.name} is for another run")
        if hello in verified:
            continue
        if hello.name not in roster.names:
            raise Aborted("roster", "opening", f"{hello.name} is not in this client's roster")
        if not roster.verifies(hello.name, hello.signature, Hello.signed_bytes(hello.run, hello.name, hello.key)):
            raise Aborted("roster", "opening", f"the key of {hello.name} is not signed by {hello.name}")
        verified.add(hello)


def check_membership(opening: Opening, name: str, key: bytes) -> None:
    """Require that the opening includes the client itself, with its current key."""
    if (name, key) not in [(hello.name, hello.key) for hello in opening.roster]:
        raise Aborted("roster", "opening", f"it does not include {name}, or lists an old key of {name}")


def check_attempt(run: RunMemory, opening: Opening) -> None:
    """Require an attempt later than any for which this key was used, so that no mask is used twice."""
    if opening.attempt <= run.attempt:
        raise Aborted(
            "attempt", "opening", f"attempt {opening.attempt} is not later than the previous one, {run.attempt}"
        )


def check_round(run: RunMemory, opening: Opening) -> None:
    """Require a round that is not revealed yet and not earlier than the previous one: a round opens at most one sum."""
    if opening.round <= run.revealed:
        raise Aborted(
            "round", "opening", f"round {opening.round} is not later than round {run.revealed}, the last revealed"
        )
    if opening.round < run.round:
        raise Aborted("round", "opening", f"round {opening.round} is earlier than the previous one, {run.round}")


def check_step(current: Current, settle: Settle) -> None:
    """Require the next step of settling."""
    if settle.step != current.step + 1:
        raise Aborted("step", "settle", f"step {settle.step} does not follow step {current.step}")


def check_members(current: Current, members: Collection[str]) -> None:
    """Require a subset of the previous members, and a smaller one after the first step: no member may return."""
    if current.step >= 0 and len(members) >= len(current.members):
        raise Aborted("members", "settle", "every further step must have fewer members")
    if not set(members) <= set(current.members):
        raise Aborted("members", "settle", "it lists a member that was dropped, or a stranger")


def check_survivors(current: Current, members: Collection[str], name: str) -> None:
    """Require that this client and enough others remain: t members, or more if their noise is needed."""
    if name not in members:
        raise Aborted("members", "settle", "it does not include this client")
    n = len(current.names)
    minimum = max(threshold(n), current.least)
    if len(members) < minimum:
        raise Aborted("few", "settle", f"{len(members)} of {n} members remain: at least {minimum} are needed")


def check_agreement(current: Current, reveal: Reveal, roster: Roster, name: str) -> None:
    """Require that at least t members, this client included, have signed the list that it signed last."""
    if (reveal.settle.step, reveal.settle.members) != (current.step, current.members):
        raise Aborted("members", "reveal", "its members are not those that this client last agreed to")
    signed_bytes, minimum = reveal.settle.signed_bytes(), threshold(len(current.names))
    num_valid = 1  # this client's own signature, which need not be checked
    for signer in current.members:
        if signer != name and signer in reveal.signatures and num_valid < minimum:
            num_valid += roster.verifies(signer, reveal.signatures[signer], signed_bytes)
    if num_valid < minimum:
        raise Aborted(
            "signatures", "reveal", f"{num_valid} members have signed the list: at least {minimum} are needed"
        )
