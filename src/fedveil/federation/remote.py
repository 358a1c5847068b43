"""A client elsewhere: from the bytes of an ask to those of its answer, the same for every engine."""

import copy
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from fedveil.defences.interface import AnyCodec, AnyDefence
from fedveil.defences.registry import build_for_client, find_codec, find_record, refuse_repeatable
from fedveil.errors import BadArgument, FedveilError
from fedveil.federation import checkpoint, masked
from fedveil.federation.client import client_update
from fedveil.federation.prepare import make_shards
from fedveil.federation.protocol import Answer, Ask, Masked, Step, bound_tensors, read, refuse_old, write
from fedveil.federation.secure import Words, encode_words
from fedveil.files import make_folder
from fedveil.records.checks import check_sources
from fedveil.records.sources import Given, Source, as_source
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.messages import known_loss
from fedveil.secagg import Identity, Memory, Party, Policy, Roster
from fedveil.secagg.signed import Digest
from fedveil.wire import Tensors, as_tensor, read_kind

Data = Given | Callable[[], Given]


@contextmanager
def refuse_failures() -> Iterator[None]:
    """Client: turn whatever the code of a model or of a defence makes of an ask that looked right into a refusal.

    The reason stays with the client, on stderr and as the cause: its text may hold values of records.
    """
    try:
        yield
    except FedveilError:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        what = f"this client cannot answer it: {type(error).__name__}"
        raise BadArgument("ask", what, "read the cause in this client's log") from error


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client's memory from one ask to the next; nobody else sees it."""

    seen: Mapping[str, Any] = field(default_factory=dict)  # session, round and token of the last ask that was answered
    private: Mapping[str, Any] = field(default_factory=dict)  # the defence's: SPN's head, PPDL's source of noise


def load_private(file: Path | None) -> dict[str, Any]:
    """Client: the defence's state in a file of the client's own; nothing if there is none yet."""
    if file is None or not file.exists():
        return {}
    try:
        return checkpoint.load(file)
    except checkpoint.Damaged as error:  # an older state would draw the same noise again
        raise BadArgument(error.where, error.what, "delete it: this client then draws a new private state") from None


def save_private(file: Path, state: Mapping[str, Any]) -> None:
    """Client: keep the defence's state in a file that only its owner can read."""
    make_folder(file.parent, 0o700)
    checkpoint.save(file, dict(state))


def reply(
    message: bytes,
    state: ClientState,
    model: nn.Module,
    data: Data,
    *,
    client: int,
    defence: AnyDefence | None = None,
    loss: Function | None = None,
    party: Party | None = None,
    policy: Policy | None = None,
    own: bytes = b"",
) -> tuple[bytes, ClientState]:
    """Client: the answer to an ask, both as bytes, and the state after it. The same for every engine.

    Nothing is read, loaded or computed before the server's signature was checked, if the client's policy names a
    server, and nothing is computed under secure aggregation before the ask was admitted and that was stored.

    Args:
        message: what arrived.
        state: the client's, after its last answer.
        model: gives the architecture; its values are ignored and stay what they are.
        data: this client's records in any form that `fedveil.Federation` takes, or a function that loads them; called
            after the message was checked.
        client: this client's number, which decides the order of its batches.
        defence: insist on these settings of a defence, whatever the server says.
        loss: the server's own function, if its loss has no name.
        party: this client's part in secure aggregation, the same object for a whole run. With one, an ask without
            secure aggregation is refused: a server cannot have it left out.
        policy: which server a client without a `party` answers; a party has its own.
        own: what arrived for this client alone.
    """
    rules = party.policy if party is not None else policy
    digest = Digest.of(message)
    own = masked.authenticate(digest, own, party, policy)
    if read_kind(message) == "step":
        step = read(message, Step)
        body = masked.respond(step, own, party, lambda: masked.check_usable(lambda: _count(data), rules or Policy()))
        return write(Step(step.session, step.step, {"body": as_tensor(body)})), state
    ask = read(message, Ask, most=bound_tensors(model))
    refuse_old(ask, state.seen)
    admitted = masked.admit(ask, message, digest, party, model) if party is not None or ask.secure else None
    seen = {"session": ask.session, "round": ask.round, "token": ask.token}
    task = _task(ask, model, defence, loss)
    if admitted is None or party is None:
        found, private = _answer(ask, task, model, data, state.private, client)
        return found, ClientState(seen, private)
    if not task.defence.linear:
        raise BadArgument("ask", f"{task.defence.name} is not linear, and its updates cannot be summed under masks")

    least = party.policy.min_records

    def work() -> Words:
        own = copy.deepcopy(model)  # what a forward pass leaves in it must not show in a later answer
        _, tensors, records, _ = _update(ask, task, own, data, {}, client, least)
        return encode_words(tensors, records, admitted.opening, admitted.clip)

    upload = party.upload(admitted.ticket, masked.contribute(admitted, work))
    return write(Masked(ask.round, ask.token, ask.defence, {"upload": as_tensor(upload)})), ClientState(
        seen, state.private
    )


IDENTITY, ROSTER, POLICY = "FEDVEIL_IDENTITY", "FEDVEIL_ROSTER", "FEDVEIL_POLICY"  # files that no job names


@lru_cache(maxsize=8)
def load_party(identity: Path, roster: Path, policy: Path | None = None) -> Party:
    """Client: its part in secure aggregation, from the files of `fedveil keys` and the roster.

    Keys of a run, and what must not be forgotten before it ends, are kept in a file beside the identity: a client whose
    process starts again goes on.

    Args:
        identity: the file of `fedveil keys new`.
        roster: the file that lists who may take part.
        policy: the file of `fedveil keys policy`; by default the one beside the identity.
    """
    own = Policy.read(policy or identity.with_suffix(".policy"))
    memory = Memory(identity.with_suffix(".memory"))
    found = Party(Identity.load(identity), Roster.read(roster), memory, policy=own)
    found.sweep()
    return found


def own_party() -> Party | None:
    """Client: the one that its environment names; None without."""
    identity, roster, policy = (os.environ.get(name) for name in (IDENTITY, ROSTER, POLICY))
    if not identity:
        return None
    if not roster:
        raise BadArgument(IDENTITY, f"{ROSTER} is not set beside it", "name the file that lists who may take part")
    return load_party(Path(identity), Path(roster), Path(policy) if policy else None)


def own_policy() -> Policy | None:
    """Client: the policy that its environment names, for a client without secure aggregation; None without."""
    path = os.environ.get(POLICY)
    return Policy.read(Path(path)) if path else None


def server_files() -> tuple[Identity | None, Roster | None]:
    """Server: its signing key and the roster, as far as its environment names them."""
    identity, roster = os.environ.get(IDENTITY), os.environ.get(ROSTER)
    return Identity.load(Path(identity)) if identity else None, Roster.read(Path(roster)) if roster else None


class _Task(NamedTuple):
    """A client's task, from the ask and its own architecture alone."""

    codec: AnyCodec
    defence: AnyDefence
    loss: Loss
    broadcast: Any
    dtype: torch.dtype  # that travels, and that the client computes in


def _task(ask: Ask, model: nn.Module, defence: AnyDefence | None, loss: Function | None) -> _Task:
    own = _defence(ask, defence)
    codec = find_codec(own)
    own_loss = known_loss("answer", ask.loss, ask.loss_settings, None if loss is None else find_loss(loss))
    with refuse_failures():
        broadcast = codec.decode_broadcast(model, ask.values, ask.tensors, own_loss)
    parameters = [tensor for name, tensor in ask.tensors.items() if name.startswith("parameter/")]
    if not parameters:
        raise BadArgument("ask", "it holds no parameters")
    return _Task(codec, own, own_loss, broadcast, parameters[0].dtype)


def _source(data: Data) -> Source:
    given = data if isinstance(data, Dataset) or not callable(data) else data()
    try:
        return check_sources([as_source("this client", given)])[0]
    except FedveilError as error:  # its text may hold values of records, and refusals travel to the server
        print(f"fedveil: {error}", file=sys.stderr)
        raise BadArgument("this client", "its records cannot be used; its own log says why") from None


def _count(data: Data) -> int:
    """How many records a client has; refuses those that cannot be used."""
    return len(_source(data))


def _update(
    ask: Ask, task: _Task, model: nn.Module, data: Data, private: Mapping[str, Any], client: int, least: int = 2
) -> tuple[dict[str, Any], Tensors, int, dict[str, Any]]:
    """Compute a client's update as it travels, from `least` records or more; its records, and its private state."""
    shards = make_shards(model, task.loss, [_source(data)], ask.batch_size, ask.seed, task.dtype)
    shards = dataclasses.replace(shards, names=(client,), least=max(2, least))
    own = task.defence.client(model, shards.example, task.loss)
    if private:
        own.restore(0, private)
    number, whole_shard, dtype = ask.round, ask.whole_shard, task.dtype
    with refuse_failures():
        update = client_update(
            own, task.broadcast, shards, client=0, number=number, whole_shard=whole_shard, dtype=dtype
        )
    return *task.codec.encode_update(update), shards.sizes[0], own.state(0)


def _answer(
    ask: Ask, task: _Task, model: nn.Module, data: Data, private: Mapping[str, Any], client: int
) -> tuple[bytes, dict[str, Any]]:
    """A client's update as bytes, and what the client keeps to itself for its next one."""
    began = time.perf_counter()
    values, tensors, records, kept = _update(ask, task, model, data, private, client)
    found = Answer(ask.round, ask.token, ask.defence, records, time.perf_counter() - began, values, tensors)
    return write(found), kept


def _defence(ask: Ask, own: AnyDefence | None) -> AnyDefence:
    """Return the client's defence: of the server's kind, and not one for tests."""
    if own is None:
        return build_for_client(ask.defence, ask.settings)
    record = find_record(own)
    if record is None or record.name != ask.defence:
        raise BadArgument("answer", f"the server's defence is {ask.defence!r}, this client insists on {own.name!r}")
    refuse_repeatable("answer", own)
    return own
