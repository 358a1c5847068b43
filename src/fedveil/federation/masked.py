"""A client's part in secure aggregation: admission first, and then nothing but the masked words depends on its records.

A server may ask with any model, exponents and members. So whatever goes wrong once records were touched, the reply
has one form: the update does not count (`no_words`), and the reason is written on the client's own machine.
"""

import contextlib
import hashlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from fedveil.checks import positive
from fedveil.errors import Aborted, BadArgument
from fedveil.federation.protocol import Ask, Step
from fedveil.federation.secure import Words, no_words
from fedveil.scheme.messages import MOST_PASSES
from fedveil.secagg import Opening, Party, Policy, signed
from fedveil.secagg.identity import KEY
from fedveil.secagg.party import Ticket
from fedveil.secagg.signed import Digest
from fedveil.wire import as_bytes, read_layout

CHALLENGE = 16  # bytes of a greeting, which the answer signs
MOST_WORDS = MOST_PASSES + 2  # for each value of the model: its passes or candidates, buffers, check words
UNUSABLE = "this client's records cannot be used, or are too few for its policy; its own log says which"


class Admission(NamedTuple):
    """An ask that a client takes part in."""

    ticket: Ticket
    clip: float | None  # with differential privacy, the largest norm of a client's gradient

    @property
    def opening(self) -> Opening:
        """The opening of the attempt."""
        return self.ticket.opening


def authenticate(digest: Digest, own: bytes, party: Party | None, policy: Policy | None) -> bytes:
    """Check the server's mark on a message; returns the bytes for this client alone.

    Args:
        digest: of what all clients get.
        own: what this one gets besides; the mark comes first.
        party: the client's part in secure aggregation, which needs a server that its policy names.
        policy: of a client without a party, which may name one.
    """
    if party is not None:
        return party.authenticate(digest.whole(), own)
    if policy is not None and policy.server is not None:
        return signed.admit(policy.server, (), digest.whole(), own)
    return own


def respond(step: Step, own: bytes, party: Party | None, check_records: Callable[[], None]) -> bytes:
    """The body of a client's answer to a step of secure aggregation other than the upload."""
    if party is None:
        raise BadArgument("step", "this client takes no part in secure aggregation", "docs/secure-aggregation.md")
    body = as_bytes("step", step.tensors, "body")
    if step.step == "hello":
        check_records()  # before any model arrives
        challenge, server = body[:CHALLENGE], body[CHALLENGE:]
        if len(challenge) != CHALLENGE or len(server) != KEY:
            raise BadArgument("step", "a greeting has a challenge and the server's key")
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


def admit(ask: Ask, message: bytes, digest: Digest, party: Party | None, model: nn.Module) -> Admission:
    """Check an ask under secure aggregation, and store that it was admitted, before anything is computed."""
    if party is None:
        what = "the server asks for secure aggregation, and this client has no identity for it"
        raise BadArgument("ask", what, "fedveil keys new NAME, and a roster (docs/secure-aggregation.md)")
    if not ask.secure:
        what = "this client takes part with secure aggregation only, and the server asks for its update as it is"
        raise BadArgument("ask", what, "secure_aggregation=True on the server")
    clip = ask.secure.get("clip")
    if clip is not None:
        positive("ask", "clip", clip)
    opening = Opening.from_values(ask.secure)
    if (ask.session, ask.round) != (opening.run, opening.round):
        raise BadArgument("ask", "its run and round are not those of its opening")
    if opening.checks == (clip is not None):
        raise BadArgument("ask", "sums have check words unless updates are clipped")
    tensors = [*model.parameters(), *model.buffers()]
    if opening.size > MOST_WORDS * (sum(tensor.numel() for tensor in tensors) + len(tensors) + 1):
        raise BadArgument("ask", f"it wants {opening.size:,} words, too many for this model")
    if not ask.whole_shard and ask.batch_size < party.policy.min_records:
        what = f"batches of {ask.batch_size} records are too small: this client's policy is {party.policy.min_records}"
        raise Aborted("policy", "ask", what)
    return Admission(party.admit(opening, digest.whole(), digest_subject(ask, message, digest.body)), clip)


def contribute(admitted: Admission, work: Callable[[], Words]) -> Words:
    """The words of a client's update. Whatever goes wrong, there are as many: of a client that contributes nothing."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException:  # an exit too
        _tell("this client contributes nothing to the sum, because of this error:")
        return no_words(admitted.opening)


def check_usable(count: Callable[[], int], policy: Policy) -> None:
    """Refuse to take part with records that cannot be used or are too few; the server gets one text for all reasons."""
    try:
        records = count()
        if records < policy.min_records:
            raise Aborted("policy", "records", f"{records} records are fewer than min_records = {policy.min_records}")
    except KeyboardInterrupt:
        raise
    except BaseException:
        _tell("this client takes no part in secure aggregation:")
        raise Aborted("policy", "records", UNUSABLE) from None


def _tell(what: str) -> None:
    """Write what is handled now to stderr, not to a logger: engines may send what is logged to the server.

    An stderr that cannot be written is ignored, or the server would learn that there was something to write.
    """
    with contextlib.suppress(Exception):
        print(f"fedveil: {what}", file=sys.stderr)
        traceback.print_exc(file=sys.stderr)


def digest_subject(ask: Ask, message: bytes, body: bytes) -> bytes:
    """The digest of what a sum is about: the broadcast. Two sums on one subject can be subtracted.

    Whatever batch is asked for, it may be all of a client's records, so batches make no difference here.
    """
    about = [ask.defence, ask.settings, ask.loss, ask.loss_settings, ask.values, read_layout(message)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode() + body).digest()
