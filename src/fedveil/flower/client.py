"""The client's side: from a message to the answer."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import nn
from torch.utils import _pytree as pytree

from fedveil.defences.interface import Defence
from fedveil.errors import BadArgument
from fedveil.federation import remote
from fedveil.federation.remote import Data
from fedveil.files import OWNER, make_folder, write_whole
from fedveil.flower.carry import own_of, unwrap, wrap
from fedveil.graph.inputs import Inputs
from fedveil.records.checks import PLAIN
from fedveil.records.inputs import Batch
from fedveil.records.sources import Given
from fedveil.scheme.losses import Function
from fedveil.secagg import Party
from fedveil.wire import from_bytes, to_bytes

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

SEEN, PRIVATE = "fedveil.seen", "fedveil.private"
SUPERLINK = 1  # the node that a ServerApp's messages come from
LARGEST_STATE = 2**24  # bytes; Flower loses large states without a word


def answer(
    message: Message,
    context: Context,
    model: nn.Module,
    data: Data,
    *,
    defence: Defence | None = None,
    loss: Function | None = None,
    client: int | None = None,
    folder: Path | None = None,
    party: Party | None = None,
) -> Message:
    """What a ClientApp returns for a message of `fedveil.flower.Server`.

    Args:
        message: what arrived.
        context: Flower's; remembers the last round, and what this client keeps to itself.
        model: gives the architecture; its values are ignored and stay what they are.
        data: this client's (inputs, targets), or a function that loads them; called after the message was checked.
            Inputs have the form of the server's `example` (docs/inputs.md).
        defence: insist on these settings of a defence (for example PPDL's noise), whatever the server says.
        loss: the server's own function, if its loss has no name.
        client: this client's number, which decides the order of its batches; by default the node's `partition-id`.
        folder: where to keep private state (SPN's head, PPDL's source of noise) on this node's disk, in place of
            Flower's context, which is lost when the SuperNode or the run ends.
        party: for secure aggregation, `fedveil.secagg.Party`; by default from FEDVEIL_IDENTITY, FEDVEIL_ROSTER and
            FEDVEIL_POLICY in the node's environment. One without a memory on disk must live as long as the run.

    Raises:
        FedveilError: a message that is stale, malformed or for another model; Flower reports it to the server.
    """
    if message.metadata.src_node_id != SUPERLINK:
        what = f"the message comes from node {message.metadata.src_node_id}, not from the server"
        raise BadArgument("message", what, "send it with fedveil.flower.Server")
    if client is None:
        client = int(str(context.node_config.get("partition-id", context.node_id)))
    seen = context.state.get(SEEN)
    file = folder / f"fedveil-client-{client}.pt" if folder is not None else None
    before = remote.ClientState(seen if isinstance(seen, ConfigRecord) else {}, _kept(context, file))
    sent = unwrap(message.content, "ask")
    own = own_of(message.content, "ask")
    reply, after = remote.reply(
        sent,
        before,
        model,
        data,
        client=client,
        defence=defence,
        loss=loss,
        party=party or remote.own_party(),
        policy=remote.own_policy(),
        own=own,
    )
    if after.private:
        _keep(after.private, context, file)
    if after.seen:
        context.state[SEEN] = ConfigRecord(dict(after.seen))
    return Message(content=wrap(reply), reply_to=message)


def client_app(
    make_model: Callable[[Context], nn.Module],
    load_data: Callable[[Context], Given],
    *,
    defence: Callable[[], Defence] | None = None,
    loss: Function | None = None,
    folder: Callable[[Context], Path] | None = None,
    party: Callable[[Context], Party] | None = None,
) -> "ClientApp":
    """A whole ClientApp: the architecture, and how a node loads its records. See `answer` for the rest."""
    from flwr.clientapp import ClientApp

    made: dict[int, Party] = {}

    def train(message: Message, context: Context) -> Message:
        if party and context.node_id not in made:
            made[context.node_id] = party(context)
        own, home = defence() if defence else None, folder(context) if folder else None
        model, data = make_model(context), lambda: load_data(context)
        return answer(
            message, context, model, data, defence=own, loss=loss, folder=home, party=made.get(context.node_id)
        )

    app = ClientApp()
    app.train()(train)
    return app


def prepared(path: Path, make: Callable[[], Batch]) -> Batch:
    """A node's (inputs, targets), made once and then read from a file of this node: a message is a new process."""
    try:
        values, tensors = from_bytes(_unsealed(path.read_bytes()), "records")
    except (FileNotFoundError, BadArgument):  # also a damaged one, and one that an older version wrote
        inputs, targets = make()
        values, tensors = _packed(inputs)
        data = to_bytes("records", values, {**tensors, "targets": targets})
        make_folder(path.parent, 0o700)
        write_whole(path, hashlib.sha256(data).digest() + data, OWNER)
        return inputs, targets
    others, form = values["others"], pytree.treespec_loads(values["form"])
    leaves = [others[str(k)] if str(k) in others else tensors[f"inputs.{k}"] for k in range(form.num_leaves)]
    return cast(Inputs, pytree.tree_unflatten(leaves, form)), tensors["targets"]


def _unsealed(content: bytes) -> bytes:
    """What is behind its own checksum."""
    size = hashlib.sha256().digest_size
    if hashlib.sha256(data := content[size:]).digest() != content[:size]:
        raise BadArgument("prepared", "the file is damaged, its checksum differs")
    return data


def _packed(inputs: Inputs) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    leaves, form = pytree.tree_flatten(inputs)
    others = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    for leaf in others.values():
        if not isinstance(leaf, PLAIN):
            raise BadArgument("prepared", f"inputs hold a {type(leaf).__name__}, which is no tensor", "tensors")
    tensors = {f"inputs.{k}": leaf for k, leaf in enumerate(leaves) if k not in others}
    return {"form": pytree.treespec_dumps(form), "others": others}, tensors


def _kept(context: Context, file: Path | None) -> dict[str, Any]:
    if file is not None:
        return remote.load_private(file)
    record = context.state.get(PRIVATE)
    if not isinstance(record, ConfigRecord):
        return {}
    values, tensors = from_bytes(cast(bytes, record["state"]), "state")
    return values | tensors


def _keep(state: Mapping[str, Any], context: Context, file: Path | None) -> None:
    if file is not None:
        remote.save_private(file, state)
        return
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    data = to_bytes("state", {name: value for name, value in state.items() if name not in tensors}, tensors)
    if len(data) > LARGEST_STATE:
        what = f"this client's private state has {len(data)} bytes, and Flower's context keeps less"
        raise BadArgument("answer", what, "answer(..., folder=Path('a folder on this node'))")
    context.state[PRIVATE] = ConfigRecord({"state": data})
