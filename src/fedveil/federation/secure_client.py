"""A client's part in secure aggregation: admission first, and then only the masked words depend on its records.

A server may ask with any model, exponents and members. So whatever goes wrong once records are touched, the reply has
the same form: the update does not count (`no_words`), and the reason goes to the client's own stderr.
"""

import contextlib
import hashlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from fedveil.errors import Aborted, BadArgument
from fedveil.federation.protocol import Ask, SecureTerms, Step
from fedveil.federation.sums import Words, no_words
from fedveil.scheme.messages import MOST_PASSES
from fedveil.secagg import Party, Policy
from fedveil.secagg.identity import KEY, Digest, admit_message
from fedveil.secagg.party import Ticket
from fedveil.wire import read_layout

CHALLENGE = 16  # bytes of a greeting, which the reply signs
MAX_WORDS = MOST_PASSES + 2  # per value of the model: its passes or candidates, buffers, check words
UNUSABLE = "this client's records cannot be used, or are too few for its policy; its own log says which"


class Admission(NamedTuple):
    """An ask in which a client takes part."""

    party: Party
    ticket: Ticket
    clip: float | None  # with differential privacy, the maximum norm of a client's gradient


def authenticate(digest: Digest, own: bytes, party: Party | None, policy: Policy | None) -> bytes:
    """Check the server's mark on a message; return the bytes for this client alone.

    Args:
        digest: of the bytes that all clients get.
        own: the bytes for this client alone, behind the mark.
        party: the client's part in secure aggregation, which requires a server that its policy names.
        policy: of a client without a party; it may name a server.
    """
    if party is not None:
        return party.authenticate(digest.combine(), own)
    if policy is not None and policy.server is not None:
        return admit_message(policy.server, (), digest.combine(), own)
    return own


def take_step(step: Step, own: bytes, party: Party | None, count_records: Callable[[], int]) -> bytes:
    """Return the body of the reply to a step of secure aggregation other than the upload."""
    if party is None:
        what = "this client takes no part in secure aggregation"
        raise BadArgument("step", what, "read docs/secure-aggregation.md")
    body = step.body
    if step.step == "hello":
        _check_records(count_records, party.policy)  # before any model arrives
        challenge, server = body[:CHALLENGE], body[CHALLENGE:]
        if len(challenge) != CHALLENGE or len(server) != KEY:
            raise BadArgument("step", "a greeting consists of a challenge and the server's key")
        hello = party.hello(step.session, server)
        return json.dumps(hello.values() | {"proof": party.prove(hello, challenge).hex()}).encode()
    if step.step == "settle":
        return party.settle(body, own)
    if step.step == "reveal":
        return party.reveal(body)
    if step.step == "end":
        party.end(step.session)
        return b""
    raise BadArgument("step", f"there is no step {step.step[:20]!a}")


def admit(ask: Ask, message: bytes, digest: Digest | None, party: Party | None, model: nn.Module) -> Admission:
    """Check an ask under secure aggregation, and store its admission, before anything is computed."""
    if party is None or digest is None:
        what = "the server asks for secure aggregation, and this client has no identity for it"
        raise BadArgument("ask", what, "run fedveil keys new NAME, and get a roster (docs/secure-aggregation.md)")
    if not ask.secure:
        what = "this client requires secure aggregation, and the server asks for its update in the clear"
        raise BadArgument("ask", what, "set secure_aggregation=True on the server")
    terms = SecureTerms.from_values(ask.secure)
    opening = terms.opening
    if (ask.session, ask.round) != (opening.run, opening.round):
        raise BadArgument("ask", "its run and round are not those of its opening")
    if opening.checks == (terms.clip is not None):
        raise BadArgument("ask", "sums have check words unless updates are clipped")
    tensors = [*model.parameters(), *model.buffers()]
    if opening.size > MAX_WORDS * (sum(tensor.numel() for tensor in tensors) + len(tensors) + 1):
        raise BadArgument("ask", f"it asks for {opening.size:,} words, too many for this model")
    if not ask.whole_shard and ask.batch_size < party.policy.min_records:
        what = f"batches of {ask.batch_size} records are too small: the minimum of this client's policy is "
        raise Aborted("policy", "ask", what + str(party.policy.min_records))
    ticket = party.admit(opening, digest.combine(), digest_subject(ask, message, digest.body))
    return Admission(party, ticket, terms.clip)


def contribute(admission: Admission, work: Callable[[], Words]) -> Words:
    """Return the words of a client's update; if anything goes wrong, those of a client that contributes nothing."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException:  # SystemExit too
        _print_failure("this client contributes nothing to the sum, because of this error:")
        return no_words(admission.ticket.opening)


def _check_records(count: Callable[[], int], policy: Policy) -> None:
    """Refuse to take part with records that cannot be used or are too few; the server gets one text for all reasons."""
    try:
        records = count()
        if records < policy.min_records:
            raise Aborted("policy", "records", f"{records} records are fewer than min_records = {policy.min_records}")
    except KeyboardInterrupt:
        raise
    except BaseException:
        _print_failure("this client takes no part in secure aggregation:")
        raise Aborted("policy", "records", UNUSABLE) from None


def _print_failure(what: str) -> None:
    """Print the exception being handled to stderr, not to a logger, whose records engines may send to the server.

    If stderr cannot be written, nothing happens: otherwise the server would learn that there was something to write.
    """
    with contextlib.suppress(Exception):
        print(f"fedveil: {what}", file=sys.stderr)
        traceback.print_exc(file=sys.stderr)


def digest_subject(ask: Ask, message: bytes, body: bytes) -> bytes:
    """Return the digest of what a sum is about, the broadcast: two sums on one subject can be subtracted.

    The batch is not included: whatever batch is asked for, it may be all of a client's records.
    """
    about = [ask.defence, ask.settings, ask.loss, ask.loss_settings, ask.values, read_layout(message)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode() + body).digest()
