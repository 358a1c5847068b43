"""A client that checks messages, computes updates and replies, whatever engine delivers the messages.

With secure aggregation, a request is admitted first; from then on, only the masked words depend on the client's
records. Since a server may send any model, exponents and members, an error after records have been read must not change
the form of the reply: the client contributes nothing to the sum (`no_words`) and prints the reason to its stderr.
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
from fedveil.federation.protocol import Answer, LastRequest, MaskedAnswer, Request, SecureTerms, Step, read, write
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

UpdateResult = tuple[Packed, int, State]  # the encoded update, the number of records and the new private state
MAX_WORDS = MAX_PASSES + 2  # maximum number of words per value: passes or candidates, buffers, check words
UNUSABLE = "this client's records cannot be used, or are too few for its policy; the reason is in its log"


def compute_update(
    defence_client: DefenceClient[B, U],
    broadcast: B,
    shards: Shards,
    dtype: torch.dtype,
    client: int,
    round_number: int,
    whole_shard: bool,
    num_members: int | None = None,
) -> U:
    """Compute a client's upload in round `round_number` from a sample, its next batch or all its records.

    A client that trains locally always uses all its records, one batch per step.
    With secure aggregation, `num_members` is the number of clients in the sum.
    """
    sample, training = defence_client.sample(shards.sizes[client]), defence_client.local_training
    if training is not None:
        batches = (Samples(*shards.take(rows)) for rows in shards.local_rows(client, round_number, training.epochs))
        update = defence_client.train(broadcast, batches, training, client)
    elif sample is not None:
        rows, is_included = sample
        inputs, targets = shards.take_separately(rows + shards.starts[client])
        update = defence_client.step(broadcast, Samples(inputs, targets, is_included.to(dtype)), client)
    elif not whole_shard:
        update = defence_client.step(broadcast, Samples(*shards.take(shards.rows(client, round_number))), client)
    else:
        update = _accumulate_shard(defence_client, broadcast, shards, dtype, client)
    return defence_client.prepare_sum(defence_client.upload(update, client), num_members)


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
    """The state that a client keeps between requests and never sends."""

    last: LastRequest | None = None
    private: State = field(default_factory=dict)  # the defence's state, such as SPN's head or PPDL's noise generator


@dataclass(frozen=True, eq=False)
class ClientTask:
    """A request, decoded for the client's model."""

    request: Request
    codec: AnyCodec
    defence: AnyDefence
    loss: Loss
    broadcast: object
    dtype: torch.dtype  # dtype of the broadcast and of the client's computation


class ClientSession:
    """A client whose server runs on another machine.

    If the client's policy specifies a server, nothing is read, loaded or computed until the server's signature is
    verified. With secure aggregation, nothing is computed until the request is admitted and the admission is stored.

    Args:
        model: a model with the server's architecture; its values are neither used nor changed.
        data: the client's records in any form that `fedveil.Federation` accepts, or a function that loads
            them, which is called after a message has been checked.
        client: index of this client, which determines the order of its batches.
        defence: a defence whose settings override the server's.
        loss: the loss function, if the server uses a custom one.
        output: the function that computes the predictions, if the server uses one.
        frozen: "local" to use this model's own frozen parameters if the server does not send them. Their values must
            equal the server's; use "local" only for a published base model.
        party: the client's side of secure aggregation; use the same object for the whole run. With a party, a request
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
        self._original_model, self._output, self._frozen = model, output, frozen
        self._defence, self._loss = defence, None if loss is None else find_loss(loss)
        self.party, self._policy = party, policy
        active_policy = policy if party is None else party.policy
        self._limits = None if active_policy is None else active_policy.privacy
        self._prepared: tuple[object, Shards] | None = None  # settings and the records prepared for them

    def reply(self, message: bytes, extra: bytes = b"") -> bytes:
        """Reply to a message.

        Args:
            message: the bytes sent to all clients.
            extra: the bytes sent only to this client.
        """
        if read_kind(message) == "step":
            return self._reply_to_step(message, extra)
        digest = None
        if self.party is not None or self._policy is not None:
            digest, _ = self._authenticate(message, extra)
        request = read(message, Request, protocol.max_tensors(self._model))
        protocol.refuse_old(request, self.state.last)
        self._model = self._original_model
        if request.output or self._output is not None:
            self._model = choose_output(self._original_model, read_choice("answer", request.output, self._output))
        if request.local:
            from fedveil.federation.frozen import restore_local

            request = restore_local(request, self._model, self._frozen)
        last_request = LastRequest(request.session, request.round, request.token)
        if self.party is not None or request.secure or self._limits is not None:
            answer, private_state = self._answer_masked(request, message, digest), self.state.private
        else:
            task, start_time = self._decode(request), time.perf_counter()
            compute = self._sum_sample if request.privacy else self._update
            (values, tensors), records, private_state = compute(task, self._model, self.state.private)
            seconds = 0.0 if request.privacy else time.perf_counter() - start_time  # the time depends on the sample
            answer = write(Answer(request.round, request.token, request.defence, records, seconds, values, tensors))
        self.state = ClientState(last_request, private_state)
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

    def _reply_to_step(self, message: bytes, extra: bytes) -> bytes:
        """Reply to a step of secure aggregation."""
        _, extra = self._authenticate(message, extra)
        step = read(message, Step)
        body = reply_to_step(step, extra, self.party, self._count_records)
        return write(Step.make(step.session, step.step, body))

    def _count_records(self) -> int:
        """Return the declared number of records, or count the records if no number is declared."""
        return len(read_own_records(self._data, check=False)) if self._limits is None else self._limits.records

    def _answer_masked(self, request: Request, message: bytes, digest: "Digest | None") -> bytes:
        """Answer a request with secure aggregation; only the masked words depend on the client's records."""
        from fedveil.federation.sums import encode_words, no_words

        party = self.party
        if not request.secure:
            problem = "this client requires secure aggregation, but the server asks for an unmasked update"
            raise BadArgument("request", problem, "set secure_aggregation=True on the server")
        if party is None or digest is None:
            problem = "the server asks for secure aggregation, but this client has no identity for it"
            raise BadArgument("request", problem, "run `fedveil keys new NAME`, then get a roster that lists it")
        dp_round = self._protect_records(request, party)
        ticket, clip = admit(request, message, digest, party, self._model, dp_round)
        task, opening = self._decode(request), ticket.opening
        if not task.defence.linear:
            problem = f"{task.defence.name} is not linear, so its masked updates cannot be summed"
            raise BadArgument("request", problem)

        if dp_round is not None:
            dp_round.enter(task, self._model, self._count_records())

        def compute_words() -> "Words":
            model = copy.deepcopy(self._model)  # this forward pass must not affect later answers
            if dp_round is not None:
                source, num_records = read_own_records(self._data, check=False), self._count_records()
                return dp_round.sum(task, model, source, lambda: self._prepare(task, model, 1), num_records, opening)
            (_, tensors), records, _ = self._update(task, model, {}, party.policy.min_records)
            return encode_words(tensors, records, opening, clip)

        make_empty = no_words if dp_round is None else dp_round.no_words
        upload = party.upload(ticket, contribute(compute_words, lambda: make_empty(opening)))
        return write(MaskedAnswer(request.round, request.token, request.defence, {"upload": as_tensor(upload)}))

    def _protect_records(self, request: Request, party: "Party") -> "RecordRound | None":
        """Return the client's side of a round that protects records, or None if neither side requires it."""
        if not request.privacy and self._limits is None:
            return None
        from fedveil.federation.record_sums import RecordRound

        return RecordRound.from_terms(request.privacy, party.policy)

    def _decode(self, request: Request) -> ClientTask:
        defence = self._find_defence(request)
        if request.privacy:
            defence = protect_records(defence, request.privacy)
        codec, loss = find_codec(defence), resolve_loss("answer", request.loss, request.loss_settings, self._loss)
        with protocol.hide_failures():
            broadcast = codec.decode_broadcast(self._model, request.values, request.tensors, loss)
        parameters = [tensor for name, tensor in request.tensors.items() if name.startswith("parameter/")]
        if not parameters:
            raise BadArgument("request", "the broadcast contains no parameters")
        return ClientTask(request, codec, defence, loss, broadcast, parameters[0].dtype)

    def _find_defence(self, request: Request) -> AnyDefence:
        """Return the defence to use; refuse the client's own defence if it is seeded or differs from the server's."""
        defence = self._defence
        if defence is None:
            return build_for_client(request.defence, request.settings)
        record = find_record(defence)
        if record is None or record.name != request.defence:
            message = f"the server asks for {request.defence!r}, but this client requires {defence.name!r}"
            raise BadArgument("answer", message)
        if LocalTraining.from_settings("request", request.settings) != defence.local_training:
            message = "the server's settings for local training differ from those that this client requires"
            raise BadArgument("answer", message, "use the same local_epochs, local_lr, local_batch and local_momentum")
        refuse_repeatable("answer", defence)
        return defence

    def _update(self, task: ClientTask, model: nn.Module, private_state: State, min_records: int = 2) -> UpdateResult:
        """Compute an update; return the update, the number of records and the client's new private state."""
        request, shards = task.request, self._prepare(task, model, max(2, min_records))
        client = task.defence.start_client(model, shards.example, task.loss)
        if private_state:
            client.restore(0, private_state)
        with protocol.hide_failures():
            update = compute_update(client, task.broadcast, shards, task.dtype, 0, request.round, request.whole_shard)
        return task.codec.encode_update(update), shards.sizes[0], client.state(0)

    def _sum_sample(self, task: ClientTask, model: nn.Module, private_state: State) -> UpdateResult:
        """Compute a sum with differential privacy for records, leaving out records for which the computation fails."""
        from fedveil.federation.record_sums import sum_sample

        source = read_own_records(self._data, check=False)
        with protocol.hide_failures():
            return sum_sample(task, model, source, lambda: self._prepare(task, model, 1)), len(source), private_state

    def _prepare(self, task: ClientTask, model: nn.Module, min_records: int) -> Shards:
        """Return the records in the form that the request requires; cache them until another form is required."""
        request = task.request
        form = request.loss, repr(request.loss_settings), request.output, task.dtype
        key = *form, request.batch_size, request.seed, min_records
        if self._prepared is None or self._prepared[0] != key:
            source = read_own_records(self._data)
            shards = make_shards(model, task.loss, [source], request.batch_size, request.seed, task.dtype)
            self._prepared = key, dataclasses.replace(shards, names=(self._client,), min_records=min_records)
        return self._prepared[1]


def reply_to_step(step: Step, extra: bytes, party: "Party | None", count_records: Callable[[], int]) -> bytes:
    """Return the body of the reply to a step of secure aggregation other than the upload."""
    from fedveil.secagg.identity import KEY_SIZE

    if party is None:
        message = "this client does not take part in secure aggregation"
        raise BadArgument("step", message, "run fedveil help secure-aggregation")
    body = step.body
    if step.step == "hello":
        _check_records(count_records, party.policy)  # before any model arrives
        challenge, server = body[: protocol.CHALLENGE_SIZE], body[protocol.CHALLENGE_SIZE :]
        if len(challenge) != protocol.CHALLENGE_SIZE or len(server) != KEY_SIZE:
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
    request: Request, message: bytes, digest: "Digest", party: "Party", model: nn.Module, dp_round: "RecordRound | None"
) -> "tuple[Ticket, float | None]":
    """Check a request for secure aggregation and store its admission; must be called before anything is computed.

    Returns the ticket and, with differential privacy for clients, the maximum norm of a client's gradient.
    """
    terms = SecureTerms.from_values(request.secure)
    opening = terms.opening
    if (request.session, request.round) != (opening.run, opening.round):
        raise BadArgument("request", "the run and round differ from those in the opening")
    if dp_round is not None:
        dp_round.check_format(opening, terms.clip)
    elif opening.checks == (terms.clip is not None):
        raise BadArgument("request", "a sum must have check words if and only if updates are not clipped")
    tensors = [*model.parameters(), *model.buffers()]
    if opening.size > MAX_WORDS * (sum(tensor.numel() for tensor in tensors) + len(tensors) + 1):
        raise BadArgument("request", f"{opening.size:,} words are requested, too many for this model")
    if dp_round is None and not request.whole_shard and request.batch_size < party.policy.min_records:
        problem = f"batches of {request.batch_size} records are too small: the minimum in this client's policy is "
        raise Aborted("policy", "request", problem + str(party.policy.min_records))
    min_members = 0 if dp_round is None else dp_round.privacy.min_members(len(opening.roster))
    subject = digest_subject(request, message, digest.body)
    return party.admit(opening, digest.combine(), subject, min_members), terms.clip


def contribute(compute: "Callable[[], Words]", fallback: "Callable[[], Words]") -> "Words":
    """Return the result of `compute`; if it fails, print the error and return the result of `fallback`."""
    try:
        return compute()
    except KeyboardInterrupt:
        raise
    except BaseException:  # including SystemExit
        protocol.print_failure("this client contributes nothing to the sum because of the following error:")
        return fallback()


def _check_records(count_records: Callable[[], int], policy: "Policy") -> None:
    """Refuse to take part if the records are unusable or too few; the server gets the same message in both cases."""
    try:
        records = count_records()
        if records < policy.min_records:
            raise Aborted("policy", "records", f"expected at least {policy.min_records} records, got {records}")
    except KeyboardInterrupt:
        raise
    except BaseException:
        protocol.print_failure("this client does not take part in secure aggregation:")
        raise Aborted("policy", "records", UNUSABLE) from None


def digest_subject(request: Request, message: bytes, body: bytes) -> bytes:
    """Return a digest that identifies the broadcast and its settings.

    Two sums over the same broadcast could be subtracted from each other. The batch size is not included, because any
    batch may contain all of a client's records.
    """
    subject = [
        request.defence,
        request.settings,
        request.loss,
        request.loss_settings,
        request.values,
        read_layout(message),
    ]
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode() + body).digest()
