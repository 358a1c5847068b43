"""The client: check a message, compute an update and answer, independently of the engine that delivers messages.

With secure aggregation, an ask is admitted first; from then on, only the masked words depend on the client's records.
Since a server may send any model, exponents and members, an error after records have been read must not change the form
of the reply: the client contributes nothing to the sum (`no_words`) and prints the reason to its stderr.
"""

import copy
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedveil.defences.interface import AnyCodec, AnyDefence, B, DefenceClient, LocalTraining, Samples, State, U
from fedveil.defences.registry import build_for_client, find_codec, find_record, protect_records, refuse_repeatable
from fedveil.errors import Aborted, BadArgument
from fedveil.federation import protocol
from fedveil.federation.prepare import OwnRecords, make_shards, read_own_records
from fedveil.federation.protocol import Answer, Ask, LastAsk, MaskedAnswer, SecureTerms, Step, read, write
from fedveil.graph.build import Frozen, check_frozen
from fedveil.graph.outputs import Output, choose_output, read_choice
from fedveil.records.shards import Shards
from fedveil.scheme.broadcast import MAX_PASSES, resolve_loss
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.wire import Packed, as_tensor, read_kind, read_layout

if TYPE_CHECKING:  # a client without secure aggregation does not import these modules
    from fedveil.federation.record_sums import RecordRound
    from fedveil.federation.sums import Words
    from fedveil.secagg import Party, Policy
    from fedveil.secagg.identity import Digest
    from fedveil.secagg.party import Ticket

MAX_WORDS = MAX_PASSES + 2  # maximum number of words per value: passes or candidates, buffers, check words
UNUSABLE = "this client's records cannot be used, or are too few for its policy; the reason is in its log"


def compute_update(
    defence_client: DefenceClient[B, U],
    broadcast: B,
    shards: Shards,
    dtype: torch.dtype,
    client: int,
    number: int,
    whole: bool,
    members: int | None = None,
) -> U:
    """Compute a client's upload in round `number` from a sample, its next batch or all its records.

    A client that trains locally always uses all its records, one batch per step.
    With secure aggregation, `members` is the number of clients in the sum.
    """
    sample, local = defence_client.sample(shards.sizes[client]), defence_client.local_training
    if local is not None:
        batches = (Samples(*shards.take(rows)) for rows in shards.local_rows(client, number, local.epochs))
        update = defence_client.train(broadcast, batches, local, client)
    elif sample is not None:
        rows, included = sample
        inputs, targets = shards.take_separately(rows + shards.starts[client])
        update = defence_client.step(broadcast, Samples(inputs, targets, included.to(dtype)), client)
    elif not whole:
        update = defence_client.step(broadcast, Samples(*shards.take(shards.rows(client, number))), client)
    else:
        update = _accumulate_shard(defence_client, broadcast, shards, dtype, client)
    return defence_client.prepare_sum(defence_client.upload(update, client), members)


def _accumulate_shard(
    defence_client: DefenceClient[B, U], broadcast: B, shards: Shards, dtype: torch.dtype, client: int
) -> U:
    """Compute a client's update from all its records, batch by batch."""
    total: U | None = None
    for rows in shards.shard(client):
        inputs, targets = shards.take(rows)
        weights = torch.full((len(rows),), 1 / shards.sizes[client], dtype=dtype, device=targets.device)
        update = defence_client.step(broadcast, Samples(inputs, targets, weights), client)
        broadcast, total = defence_client.accumulate(broadcast, total, update)
    assert total is not None
    return total


@dataclass(frozen=True, eq=False)
class ClientState:
    """The state that a client keeps between asks and does not share."""

    last: LastAsk | None = None
    private: State = field(default_factory=dict)  # the defence's state, such as SPN's head or PPDL's noise generator


@dataclass(frozen=True, eq=False)
class ClientTask:
    """An ask, decoded for the client's model."""

    ask: Ask
    codec: AnyCodec
    defence: AnyDefence
    loss: Loss
    broadcast: object
    dtype: torch.dtype  # dtype of the broadcast and of the client's computation


class ClientSession:
    """A client whose server runs on another machine.

    If the client's policy specifies a server, nothing is read, loaded or computed until its signature is verified.
    With secure aggregation, nothing is computed until the ask has been admitted and the admission has been stored.

    Args:
        model: a model with the server's architecture; its values are neither used nor changed.
        data: the client's records in any form that `fedveil.Federation` accepts, or a function that loads
            them, which is called after a message has been checked.
        client: index of this client, which determines the order of its batches.
        defence: a defence whose settings override the server's.
        loss: the loss function, if the server uses a custom one.
        output: the function that computes the predictions, if the server uses one.
        frozen: "local" to use this model's own frozen parameters if the server does not send them. Their values must
            equal the server's; choose it only for a published base.
        party: the client's side of secure aggregation; use the same object for the whole run. With a party, an ask
            without secure aggregation is refused, so that the server cannot switch it off.
        policy: the policy of a client without a `party`; a party has its own policy.
        state: the client's state after its last answer.
    """

    def __init__(
        self,
        model: nn.Module,
        data: OwnRecords,
        *,
        client: int,
        defence: AnyDefence | None = None,
        loss: Function | None = None,
        output: Output | None = None,
        frozen: Frozen = "sent",
        party: "Party | None" = None,
        policy: "Policy | None" = None,
        state: ClientState | None = None,
    ) -> None:
        self.state = state or ClientState()
        self._model, self._data, self._client = model, data, client
        check_frozen("client", frozen)
        self._given, self._output, self._frozen = model, output, frozen
        self._defence, self._loss = defence, None if loss is None else find_loss(loss)
        self.party, self._policy = party, policy
        own = policy if party is None else party.policy
        self._limits = None if own is None else own.privacy
        self._prepared: tuple[object, Shards] | None = None  # settings and the records prepared for them

    def reply(self, message: bytes, extra: bytes = b"") -> bytes:
        """Answer a message.

        Args:
            message: the bytes sent to all clients.
            extra: the bytes sent only to this client.
        """
        if read_kind(message) == "step":
            return self._take_step(message, extra)
        digest = None
        if self.party is not None or self._policy is not None:
            digest, _ = self._authenticate(message, extra)
        ask = read(message, Ask, protocol.max_tensors(self._model))
        protocol.refuse_old(ask, self.state.last)
        self._model = self._given
        if ask.output or self._output is not None:
            self._model = choose_output(self._given, read_choice("answer", ask.output, self._output))
        if ask.local:
            from fedveil.federation.frozen import restore_local

            ask = restore_local(ask, self._model, self._frozen)
        last = LastAsk(ask.session, ask.round, ask.token)
        if self.party is not None or ask.secure or self._limits is not None:
            answer, private = self._answer_masked(ask, message, digest), self.state.private
        else:
            task, began = self._decode(ask), time.perf_counter()
            compute = self._sum_sample if ask.privacy else self._update
            (values, tensors), records, private = compute(task, self._model, self.state.private)
            seconds = 0.0 if ask.privacy else time.perf_counter() - began  # it would reveal something about the sample
            answer = write(Answer(ask.round, ask.token, ask.defence, records, seconds, values, tensors))
        self.state = ClientState(last, private)
        return answer

    def _authenticate(self, message: bytes, extra: bytes) -> "tuple[Digest, bytes]":
        """Verify the server's signature or tag on a message; return its digest and the bytes for this client.

        A party accepts only the server in its policy. Without a party, the policy may specify a server.
        """
        from fedveil.secagg.identity import Digest, admit_message

        digest = Digest.compute(message)
        if self.party is not None:
            extra = self.party.authenticate(digest.combine(), extra)
        elif self._policy is not None and self._policy.server is not None:
            extra = admit_message(self._policy.server, (), digest.combine(), extra)
        return digest, extra

    def _take_step(self, message: bytes, extra: bytes) -> bytes:
        """Reply to a step of secure aggregation."""
        _, extra = self._authenticate(message, extra)
        step = read(message, Step)
        body = take_step(step, extra, self.party, self._count_records)
        return write(Step.make(step.session, step.step, body))

    def _count_records(self) -> int:
        """Return the declared number of records, or count the records if no number is declared."""
        return len(read_own_records(self._data, check=False)) if self._limits is None else self._limits.records

    def _answer_masked(self, ask: Ask, message: bytes, digest: "Digest | None") -> bytes:
        """Answer an ask with secure aggregation; only the masked words depend on the client's records."""
        from fedveil.federation.sums import encode_words, no_words

        party = self.party
        if not ask.secure:
            what = "this client requires secure aggregation, but the server asks for its update in the clear"
            raise BadArgument("ask", what, "set secure_aggregation=True on the server")
        if party is None or digest is None:
            what = "the server asks for secure aggregation, but this client has no identity for it"
            raise BadArgument("ask", what, "run fedveil keys new NAME, and get a roster")
        private = self._protect_records(ask, party)
        ticket, clip = admit(ask, message, digest, party, self._model, private)
        task, opening = self._decode(ask), ticket.opening
        if not task.defence.linear:
            what = f"{task.defence.name} is not linear, so its masked updates cannot be summed"
            raise BadArgument("ask", what)

        if private is not None:
            private.enter(task, self._model, self._count_records())

        def work() -> "Words":
            model = copy.deepcopy(self._model)  # this forward pass must not affect later answers
            if private is not None:
                source, declared = read_own_records(self._data, check=False), self._count_records()
                return private.sum(task, model, source, lambda: self._prepare(task, model, 1), declared, opening)
            (_, tensors), records, _ = self._update(task, model, {}, party.policy.min_records)
            return encode_words(tensors, records, opening, clip)

        nothing = no_words if private is None else private.no_words
        upload = party.upload(ticket, contribute(work, lambda: nothing(opening)))
        return write(MaskedAnswer(ask.round, ask.token, ask.defence, {"upload": as_tensor(upload)}))

    def _protect_records(self, ask: Ask, party: "Party") -> "RecordRound | None":
        """Return the client's side of a round that protects records, or None if neither side requires protection."""
        if not ask.privacy and self._limits is None:
            return None
        from fedveil.federation.record_sums import RecordRound

        return RecordRound.from_terms(ask.privacy, party.policy)

    def _decode(self, ask: Ask) -> ClientTask:
        defence = self._find_defence(ask)
        if ask.privacy:
            defence = protect_records(defence, ask.privacy)
        codec, loss = find_codec(defence), resolve_loss("answer", ask.loss, ask.loss_settings, self._loss)
        with protocol.hide_failures():
            broadcast = codec.decode_broadcast(self._model, ask.values, ask.tensors, loss)
        parameters = [tensor for name, tensor in ask.tensors.items() if name.startswith("parameter/")]
        if not parameters:
            raise BadArgument("ask", "it contains no parameters")
        return ClientTask(ask, codec, defence, loss, broadcast, parameters[0].dtype)

    def _find_defence(self, ask: Ask) -> AnyDefence:
        """Return the defence to use; refuse the client's own if it differs from the server's or uses test entropy."""
        own = self._defence
        if own is None:
            return build_for_client(ask.defence, ask.settings)
        record = find_record(own)
        if record is None or record.name != ask.defence:
            raise BadArgument("answer", f"the server asks for {ask.defence!r}, but this client requires {own.name!r}")
        if LocalTraining.from_settings("ask", ask.settings) != own.local_training:
            what = "the server's settings for local training differ from those that this client requires"
            raise BadArgument("answer", what, "use the same local_epochs, local_lr, local_batch and local_momentum")
        refuse_repeatable("answer", own)
        return own

    def _update(self, task: ClientTask, model: nn.Module, private: State, least: int = 2) -> tuple[Packed, int, State]:
        """Compute an update; return it, its number of records and the client's new private state."""
        ask, shards = task.ask, self._prepare(task, model, max(2, least))
        client = task.defence.start_client(model, shards.example, task.loss)
        if private:
            client.restore(0, private)
        with protocol.hide_failures():
            update = compute_update(client, task.broadcast, shards, task.dtype, 0, ask.round, ask.whole_shard)
        return task.codec.encode_update(update), shards.sizes[0], client.state(0)

    def _sum_sample(self, task: ClientTask, model: nn.Module, private: State) -> tuple[Packed, int, State]:
        """Compute a sum with differential privacy for records, leaving out records on which it fails."""
        from fedveil.federation.record_sums import sum_sample

        source = read_own_records(self._data, check=False)
        with protocol.hide_failures():
            return sum_sample(task, model, source, lambda: self._prepare(task, model, 1)), len(source), private

    def _prepare(self, task: ClientTask, model: nn.Module, min_records: int) -> Shards:
        """Return the records in the form that the ask requires, and cache them until an ask requires another form."""
        ask = task.ask
        form = (ask.loss, repr(ask.loss_settings), ask.output, ask.batch_size, ask.seed, task.dtype, min_records)
        if self._prepared is None or self._prepared[0] != form:
            source = read_own_records(self._data)
            shards = make_shards(model, task.loss, [source], ask.batch_size, ask.seed, task.dtype)
            self._prepared = form, dataclasses.replace(shards, names=(self._client,), min_records=min_records)
        return self._prepared[1]


def take_step(step: Step, extra: bytes, party: "Party | None", count_records: Callable[[], int]) -> bytes:
    """Return the body of the reply to a step of secure aggregation other than the upload."""
    from fedveil.secagg.identity import KEY_SIZE

    if party is None:
        what = "this client does not take part in secure aggregation"
        raise BadArgument("step", what, "run fedveil help secure-aggregation")
    body = step.body
    if step.step == "hello":
        _check_records(count_records, party.policy)  # before any model arrives
        challenge, server = body[: protocol.CHALLENGE], body[protocol.CHALLENGE :]
        if len(challenge) != protocol.CHALLENGE or len(server) != KEY_SIZE:
            raise BadArgument("step", "a greeting must consist of a challenge and the server's key")
        hello = party.hello(step.session, server)
        return json.dumps(hello.values() | {"proof": party.prove(hello, challenge).hex()}).encode()
    if step.step == "settle":
        return party.settle(body, extra)
    if step.step == "reveal":
        return party.reveal(body)
    if step.step == "end":
        party.end(step.session)
        return b""
    raise BadArgument("step", f"unknown step {step.step[:20]!a}")


def admit(
    ask: Ask, message: bytes, digest: "Digest", party: "Party", model: nn.Module, private: "RecordRound | None"
) -> "tuple[Ticket, float | None]":
    """Check an ask with secure aggregation and store its admission; nothing may be computed before that.

    Returns the ticket and, with differential privacy for clients, the maximum norm of a client's gradient.
    """
    terms = SecureTerms.from_values(ask.secure)
    opening = terms.opening
    if (ask.session, ask.round) != (opening.run, opening.round):
        raise BadArgument("ask", "its run and round differ from those in its opening")
    if private is not None:
        private.check_format(opening, terms.clip)
    elif opening.checks == (terms.clip is not None):
        raise BadArgument("ask", "a sum must have check words if and only if updates are not clipped")
    tensors = [*model.parameters(), *model.buffers()]
    if opening.size > MAX_WORDS * (sum(tensor.numel() for tensor in tensors) + len(tensors) + 1):
        raise BadArgument("ask", f"it asks for {opening.size:,} words, too many for this model")
    if private is None and not ask.whole_shard and ask.batch_size < party.policy.min_records:
        what = f"batches of {ask.batch_size} records are too small: the minimum in this client's policy is "
        raise Aborted("policy", "ask", what + str(party.policy.min_records))
    min_members = 0 if private is None else private.privacy.min_members(len(opening.roster))
    return party.admit(opening, digest.combine(), digest_subject(ask, message, digest.body), min_members), terms.clip


def contribute(work: "Callable[[], Words]", fallback: "Callable[[], Words]") -> "Words":
    """Return the result of `work`; if it fails, print the error and return the result of `fallback`."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException:  # including SystemExit
        protocol.print_failure("this client contributes nothing to the sum because of the following error:")
        return fallback()


def _check_records(count: Callable[[], int], policy: "Policy") -> None:
    """Refuse to take part if the records are unusable or too few; the server gets the same message in both cases."""
    try:
        records = count()
        if records < policy.min_records:
            raise Aborted("policy", "records", f"{records} records are fewer than min_records = {policy.min_records}")
    except KeyboardInterrupt:
        raise
    except BaseException:
        protocol.print_failure("this client does not take part in secure aggregation:")
        raise Aborted("policy", "records", UNUSABLE) from None


def digest_subject(ask: Ask, message: bytes, body: bytes) -> bytes:
    """Return a digest of the broadcast and its settings, since two sums for the same broadcast could be subtracted.

    The batch size is not included, because any batch may contain all of a client's records.
    """
    about = [ask.defence, ask.settings, ask.loss, ask.loss_settings, ask.values, read_layout(message)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode() + body).digest()
