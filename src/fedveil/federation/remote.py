"""Federations whose clients run on other machines: the server, and an engine for any transport."""

import itertools
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedveil.checks import check_count
from fedveil.defences.interface import AnyCodec, AnyDefence, AnyRound, LocalTraining
from fedveil.defences.registry import add_privacy, find_codec, find_record
from fedveil.errors import BadArgument
from fedveil.federation import protocol
from fedveil.federation.evaluate import move_inputs
from fedveil.federation.limits import Limits
from fedveil.federation.prepare import Optimizer, Schedule
from fedveil.federation.protocol import AnyReply, Channels, Fault, Member, Reply, Request, SecureTerms, Step
from fedveil.federation.rounds import ClearRound, RoundPolicy
from fedveil.federation.server import Server
from fedveil.federation.sums import FIRST_RECORDS
from fedveil.graph.build import local_parameters
from fedveil.graph.coverage import describe_shares
from fedveil.graph.foreign_code import unwrap
from fedveil.graph.inputs import Inputs
from fedveil.graph.outputs import Output, choose_output, chosen_output, describe_output
from fedveil.privacy.settings import Privacy
from fedveil.scheme import Entropy
from fedveil.scheme.losses import Function, Loss
from fedveil.secagg import Identity, Roster
from fedveil.secagg.environment import IDENTITY, ROSTER, load_server_files
from fedveil.secagg.identity import Digest, sign_message, tag_message
from fedveil.wire import as_bytes

if TYPE_CHECKING:
    from fedveil.federation.description import RunTerms

LOG = logging.getLogger("fedveil.rounds")
R = TypeVar("R")
C = TypeVar("C")  # the type of the connection: Flower's grid or FLARE's sites


class Transport(Protocol):
    """Sends bytes to clients and receives their replies. Fatal errors of the transport are raised."""

    def members(self) -> list[Member]:
        """Return the clients that can be asked now, in a fixed order."""

    def ask(
        self, common: bytes, extras: Mapping[Member, bytes], *, label: str, timeout: float
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """Send messages to the clients in `extras`; yield replies and faults as they arrive.

        At least one reply or fault is yielded for every client: the fault "silent" for a client that has not replied
        after `timeout` seconds. Closing the iterator abandons outstanding replies.

        Args:
            common: bytes for all clients.
            extras: additional bytes for each client; may be empty.
            label: name of the exchange in logs.
            timeout: timeout in seconds.
        """

    def close(self) -> None:
        """Release the connection; where possible, tell clients that there will be no more messages."""


class RemoteEngine:
    """Encodes and signs requests, and decodes the replies from a transport.

    Args:
        transport: sends and receives bytes.
        server: the server that runs the rounds.
        identity: the key that signs every message without a tag; None if clients accept any server.
        whole_shard: whether clients go through all their records in a round.
        batch_size: number of records that a client processes at a time.
    """

    stream, stable, keeps_nothing = "nodes", False, False

    def __init__(
        self, transport: Transport, server: Server, identity: Identity | None, whole_shard: bool, batch_size: int
    ) -> None:
        self.transport, self._server, self._identity = transport, server, identity
        self.codec, self.session = find_codec(server.defence), Entropy().token()
        requested_defence = server.defence.requested
        record = find_record(requested_defence)
        if record is None:
            fix = "register the defence in your package's entry-point group fedveil.defences"
            raise BadArgument(type(server).__name__, f"clients cannot find the defence {requested_defence.name}", fix)
        local_training, loss = server.defence.local_training, server.loss
        setting_names = requested_defence.remote_settings
        if local_training is None:
            setting_names = tuple([name for name in setting_names if name not in LocalTraining.NAMES])
        else:
            whole_shard, batch_size = True, local_training.batch_size or batch_size
        settings = {name: getattr(requested_defence, name) for name in setting_names}
        self._task = record.name, settings, loss.name, loss.settings(), whole_shard, batch_size, server.seed
        self._privacy = server.defence.record_terms
        self._omits, self._output = requested_defence.frozen == "local", describe_output(chosen_output(server.model))
        self.traffic = protocol.Traffic()

    def start_round(self) -> None:
        """Start counting the traffic of a round."""
        self.traffic = protocol.Traffic()

    def members(self) -> list[Member]:
        """Return the clients that can be asked now, in a fixed order."""
        return self.transport.members()

    def ask(self, round_number: int, defence_round: AnyRound, members: Sequence[Member]) -> Iterator[AnyReply | Fault]:
        """Send the broadcast of a round; yield a reply or a fault for each client."""
        request, model, positions = (
            self._make_request(round_number, defence_round),
            self._server.model,
            itertools.count(),
        )

        def decode(member: Member, data: bytes) -> AnyReply:
            reply, seconds = decode_answer(data, request, self.codec, defence_round, model, member, next(positions))
            self.traffic.seconds_work = max(self.traffic.seconds_work, seconds)
            return reply

        return self._send(protocol.write(request), dict.fromkeys(members, b""), None, str(round_number), decode)

    def ask_masked(
        self,
        round_number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        terms: SecureTerms,
        channels: Channels,
    ) -> tuple[bytes, Iterator[tuple[Member, bytes] | Fault]]:
        """Send the broadcast of a secure-aggregation attempt; return its digest and the masked uploads."""
        request = self._make_request(round_number, defence_round, terms)
        message = protocol.write(request)
        digest = Digest.compute(message).combine()

        def decode(member: Member, data: bytes) -> tuple[Member, bytes]:
            answer = protocol.read(data, protocol.MaskedAnswer, 1)
            protocol.check_exchange(answer, request)
            return member, as_bytes("answer", answer.tensors, "upload")

        extras = dict.fromkeys(members, b"")
        return digest, self._send(message, extras, channels, f"{round_number} upload", decode, digest=digest)

    def run_step(
        self, step: Step, extras: Mapping[Member, bytes], channels: Channels | None, timeout: float | None = None
    ) -> Iterator[tuple[Member, bytes] | Fault]:
        """Send a step of secure aggregation; yield the bodies of the replies."""

        def decode(member: Member, data: bytes) -> tuple[Member, bytes]:
            result = protocol.read(data, Step, 1)
            if (result.session, result.step) != (step.session, step.step):
                raise BadArgument("step", "the message is a reply to another step")
            return member, result.body

        label = f"{self._server.round} {step.step}"
        return self._send(protocol.write(step), extras, channels, label, decode, timeout=timeout)

    def close(self) -> None:
        """Release the connection."""
        self.transport.close()

    def _send(
        self,
        common: bytes,
        extras: Mapping[Member, bytes],
        channels: Channels | None,
        label: str,
        decode: Callable[[Member, bytes], R],
        *,
        timeout: float | None = None,
        digest: bytes | None = None,
    ) -> Iterator[R | Fault]:
        """Exchange messages once; tag them if there are channels, or else sign them if there is an identity."""
        if channels is not None:
            digest = digest or Digest.compute(common).combine()
            extras = {member: tag_message(channels[member], digest, extra) for member, extra in extras.items()}
        elif self._identity is not None:
            signed_extras = {
                extra: sign_message(self._identity, common, extra) for extra in dict.fromkeys(extras.values())
            }
            extras = {member: signed_extras[extra] for member, extra in extras.items()}
        self.traffic.count_sent([len(common) + len(extra) for extra in extras.values()])
        self.traffic.members.update(extras)
        timeout_seconds, start_time = self._server.policy.timeout if timeout is None else timeout, time.monotonic()
        for member, reply in self.transport.ask(common, extras, label=label, timeout=timeout_seconds):
            self.traffic.seconds.pop(member, None)
            if isinstance(reply, Fault):
                yield reply
                continue
            self.traffic.bytes_received += len(reply)
            try:
                result: R | Fault = decode(member, reply)
                self.traffic.seconds[member] = time.monotonic() - start_time
            except Exception as error:  # nothing that a client sends may end the run
                result = protocol.describe_refusal(member, error)
            yield result

    def _make_request(self, round_number: int, defence_round: AnyRound, terms: SecureTerms | None = None) -> Request:
        packed, digest = self.codec.encode_broadcast(defence_round.broadcast), ""
        local_tensors = local_parameters(self._server.model) if self._omits else {}
        if local_tensors:
            from fedveil.federation.frozen import digest_parameters, omit_local

            packed, digest = omit_local(packed, local_tensors), digest_parameters(local_tensors)
        secure = terms.values() if terms else {}
        return Request(
            self.session,
            round_number,
            Entropy().token(),
            *self._task,
            self._privacy,
            secure,
            *packed,
            digest,
            self._output,
        )


def decode_answer(
    data: bytes,
    request: Request,
    codec: AnyCodec,
    defence_round: AnyRound,
    model: nn.Module,
    member: Member,
    position: int,
) -> tuple[AnyReply, float]:
    """Return a client's reply to this request and the client's computing time in seconds; refuse an unusable update."""
    answer = protocol.read(data, protocol.Answer, protocol.max_tensors(model))
    protocol.check_exchange(answer, request)
    update = codec.decode_update(defence_round.base, model, answer.values, answer.tensors, position)
    return Reply((member,), update, answer.records), answer.seconds


class RemoteServer(Server, Generic[C]):
    """A server whose clients run on other machines, each with a `fedveil.federation.client.ClientSession`.

    Each round is one exchange of messages. Valid replies that arrive in time are combined, weighted by |D_k|; if there
    are fewer than `min_answers`, the round is repeated with new noise. docs/flower.md describes how each kind of fault
    is handled.

    Args:
        connection: Flower's grid, or FLARE's `collab.clients`.
        model: the server's model; trained in place.
        example: the inputs of at least two records, used to analyse the model; their values do not matter. They have
            the same form as the clients': a tensor, a tuple of forward's arguments or a dict of its keyword arguments.
        defence: as for `fedveil.Federation`. A defence with test entropy or a seed is refused.
        optimizer: as for `fedveil.Federation`.
        schedule: as for `fedveil.Federation`; an epoch is `rounds_per_epoch` rounds.
        schedule_every: as for `fedveil.Federation`.
        clip_norm: as for `fedveil.Federation`.
        loss: as for `fedveil.Federation`, but required, since the server does not see the clients' targets. A custom
            function must also be passed to the clients.
        output: as for `fedveil.Federation`; a function must also be passed to the clients.
        whole_shard: whether clients go through all their records in a round, so that fewer rounds are needed.
            Clients that train locally always do.
        batch_size: number of records that a client processes at a time or, without `whole_shard`, in a round.
        rounds_per_epoch: number of rounds in an epoch, for the schedule and for evaluation.
        participation: fraction of the clients that are asked in a round.
        limits: bounds on each client and the aggregation rule: `fedveil.Limits`. With None, all finite updates are
            used, and the noise is removed once, from their sum. Secure aggregation and privacy for records require
            None.
        privacy: settings for differential privacy: `fedveil.Privacy`. Privacy for records requires a `rate`; if clients
            add the noise, each of them enforces its own limits and keeps a ledger (docs/defences/privacy.md).
        min_answers: the minimum number of valid replies in a round.
        wait_for: the minimum number of clients before the first round; by default, `min_answers`.
        timeout: timeout of an exchange in seconds, after which its messages expire.
        patience: seconds to wait for clients in a round before giving up.
        attempts: maximum number of attempts at a round before giving up.
        pause: seconds between attempts.
        secure_aggregation: a roster, or True to read it from the file in FEDVEIL_ROSTER. The server then sees only sums
            of updates; clients need an identity, a roster and a policy (docs/secure-aggregation.md). Secure
            aggregation cannot be combined with limits.
        identity: the server's signing key; by default, it is read from the file in FEDVEIL_IDENTITY. Every message is
            signed, and clients whose policy contains the public key answer no other server. Required for secure
            aggregation.
        seed: seed for the order of clients' records and for the choice of clients.
    """

    def __init__(
        self,
        connection: C,
        model: nn.Module,
        example: Inputs,
        defence: str | AnyDefence = "veil",
        optimizer: Optimizer = torch.optim.Adam,
        *,
        schedule: Schedule | None = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        loss: str | Loss | Function | None = None,
        output: Output | None = None,
        whole_shard: bool = True,
        batch_size: int = 1024,
        rounds_per_epoch: int = 1,
        participation: float = 1.0,
        limits: Limits | None = Limits(),  # noqa: B008  (it is frozen)
        privacy: Privacy | None = None,
        min_answers: int = 1,
        wait_for: int | None = None,
        timeout: float = 600.0,
        patience: float = 1800.0,
        attempts: int = 5,
        pause: float = 2.0,
        secure_aggregation: bool | Roster = False,
        identity: Identity | None = None,
        seed: int = 0,
    ) -> None:
        where = type(self).__name__
        model = unwrap(where, model)
        if loss is None:
            message = "loss must be given, because the server does not see the clients' targets"
            raise BadArgument(where, message, 'use loss="cross_entropy" for classes, loss="squared_error" for numbers')
        protects_records = privacy is not None and privacy.unit == "record"
        if (secure_aggregation or protects_records) and limits == Limits():
            limits = None
        if privacy is not None:
            defence = self._add_privacy(defence, privacy, bool(secure_aggregation))
        model = choose_output(model, output)
        policy = RoundPolicy(participation, min_answers, wait_for, timeout, patience, attempts, pause)
        super().__init__(model, defence, optimizer, schedule, schedule_every, clip_norm, loss, limits, policy, seed)
        if self.defence.repeatable:
            message = f"{self.defence.name} draws from a test seed, but this server communicates over a network"
            raise BadArgument(where, message, "create the defence without entropy= and seed=")
        self._epoch = check_count(where, "rounds_per_epoch", rounds_per_epoch)
        self.example = example = move_inputs(example, self.device)
        self._whole_shard, self._batch_size = whole_shard, batch_size
        self.defence_server = self.defence.server(model, example, self.loss)
        server_identity, roster = load_server_files()
        identity = identity or server_identity
        transport = self._connect(connection)
        engine = RemoteEngine(transport, self, identity, whole_shard, check_count(where, "batch_size", batch_size))
        self.engine = engine
        if not secure_aggregation:
            self.rounds = ClearRound(engine, model, self.history, self.limits, min_answers)
        else:
            roster = secure_aggregation if isinstance(secure_aggregation, Roster) else roster
            if roster is None or identity is None:
                message = "secure aggregation needs the roster of members and this server's signing key"
                fix = f"set {ROSTER} and {IDENTITY}, or pass secure_aggregation=Roster.read(...) and identity=..."
                raise BadArgument(where, message, fix)
            client, local_training = self.defence.start_client(model, example, self.loss), self.defence.local_training
            local_batch_size = (local_training and local_training.batch_size) or batch_size
            steps = local_training.epochs * math.ceil(FIRST_RECORDS / local_batch_size) if local_training else 1
            self._start_secure(client, example, roster, engine.session, steps=steps)
        if self.defence_server.plan is not None:
            LOG.info("of the model's values, %s", describe_shares(self.defence_server.plan))

    @staticmethod
    def _add_privacy(defence: str | AnyDefence, privacy: Privacy, secure: bool) -> AnyDefence:
        """Add differential privacy to a defence; refuse settings that require information the server does not have."""
        if privacy.unit == "record" and privacy.rate is None:
            message = "the sampling rate is missing, and the server does not know how many records clients have"
            raise BadArgument("privacy", message, "pass a rate: fedveil.Privacy(rate=0.05, ...)")
        if privacy.noise_by == "clients" and not secure:
            message = "noise_by='clients' requires secure aggregation: a single update has only one share of the noise"
            raise BadArgument("privacy", message, 'set secure_aggregation=True, or noise_by="server"')
        return add_privacy(defence, privacy, 1.0)

    def _comparison_batch(self) -> tuple[Inputs, Tensor | None]:
        """Return the example, whose targets are unknown."""
        return self.example, None

    @abstractmethod
    def _connect(self, connection: C) -> Transport:
        """Return the transport to the clients."""

    @property
    def rounds_per_epoch(self) -> int:
        """The number of rounds per epoch, as passed to the constructor."""
        return self._epoch

    @property
    def terms(self) -> "RunTerms":
        """The settings of the clients, and the number of clients in the largest round."""
        from fedveil.federation.description import RunTerms

        max_asked = max((int(record.figures.get("asked", 0)) for record in self.history.records), default=0)
        clients = round(max_asked / self.policy.participation)
        return RunTerms(True, clients, None, self._batch_size, self._whole_shard)
