"""The client's side: from a message to the answer."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

from fedveil.defences import Defence
from fedveil.defences.wire import PlainWire, named_wire, wire_of
from fedveil.errors import BadArgument, StaleUpdate
from fedveil.federation import checkpoint
from fedveil.federation.client import client_update, dense_targets
from fedveil.federation.evaluate import moved, rows_of
from fedveil.federation.shards import PLAIN, Batch, check_clients, gather
from fedveil.flower.wire import Answer, Ask, read_ask, write_answer
from fedveil.graph.inputs import Inputs
from fedveil.scheme.losses import Function, Loss, find_loss, named_loss

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

SEEN, PRIVATE = "fedveil.seen", "fedveil.private"
LARGEST_STATE = 2**24  # bytes; Flower loses large states without a word
Data = Batch | Callable[[], Batch]


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
) -> Message:
    """What a ClientApp returns for a message of `fedveil.flower.Server`.

    Args:
        message: what arrived.
        context: Flower's; remembers the last round, and what this client keeps to itself.
        model: gives the architecture; its values are ignored and stay what they are.
        data: this client's (inputs, targets), or a function that loads them; called after the message was checked.
            Inputs of any form that forward takes (docs/inputs.md), the same one as the server's `example`.
        defence: insist on these settings of a defence (for example PPDL's noise), whatever the server says.
        loss: the server's own function, if its loss has no name.
        client: this client's number, which decides the order of its batches; by default the node's `partition-id`.
        folder: where to keep private state (SPN's head, PPDL's source of noise) on this node's disk, in place of
            Flower's context, which is lost when the SuperNode or the run ends.

    Raises:
        FedveilError: a message that is stale, malformed or for another model; Flower reports it to the server.
    """
    ask = read_ask(message.content)
    _refuse_old(context, ask)
    if client is None:
        client = int(str(context.node_config.get("partition-id", context.node_id)))
    wire, own, found = _defence(ask, defence), defence, _loss(ask, loss)
    own = own or _build(wire, ask)
    broadcast = wire.unpack(model, ask.arrays, ask.values, found)
    (own_data,) = check_clients([data() if callable(data) else data])
    inputs, targets = dense_targets(model, found, own_data)
    device, dtype = next(model.parameters()).device, _dtype(ask)
    shards = gather([(moved(inputs, device, dtype), targets)], ask.batch_size, ask.seed, device)
    shards = dataclasses.replace(shards, names=(client,))
    own.prepare_client(model, rows_of(shards.inputs, 0, 2), found)
    _restore(own, context, folder, client)
    update = client_update(
        own, model, broadcast, shards, client=0, number=ask.round, whole_shard=ask.whole_shard, dtype=dtype
    )
    arrays, values = wire.pack_update(own, update)
    reply = Answer(ask.round, ask.token, ask.kind, shards.sizes[0], arrays, values)
    _keep(own, context, folder, client)
    context.state[SEEN] = ConfigRecord({"session": ask.session, "round": ask.round, "token": ask.token})
    return Message(content=write_answer(reply), reply_to=message)


def client_app(
    make_model: Callable[[Context], nn.Module],
    load_data: Callable[[Context], Batch],
    *,
    defence: Callable[[], Defence] | None = None,
    loss: Function | None = None,
    folder: Callable[[Context], Path] | None = None,
) -> "ClientApp":
    """A whole ClientApp: the architecture, and how a node loads its records. See `answer` for the rest."""
    from flwr.clientapp import ClientApp

    def train(message: Message, context: Context) -> Message:
        return answer(
            message,
            context,
            make_model(context),
            lambda: load_data(context),
            defence=defence() if defence else None,
            loss=loss,
            folder=folder(context) if folder else None,
        )

    app = ClientApp()
    app.train()(train)
    return app


def prepared(path: Path, make: Callable[[], Batch]) -> Batch:
    """A node's (inputs, targets), made once and then read from a file of this node: a message is a new process."""
    if not path.exists():
        inputs, targets = make()
        tensors, form = _packed(inputs)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"{path.name}.{os.getpid()}.part")
        save_file({**tensors, "targets": targets.contiguous()}, half, form)
        half.chmod(0o600)
        os.replace(half, path)
    with safe_open(path, "pt") as file:
        found, form = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    return _unpacked(found, form), found["targets"]


def _packed(inputs: Inputs) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """The tensors by name, and what else it takes to put them together again; None for a single tensor."""
    if isinstance(inputs, torch.Tensor):
        return {"inputs": inputs.contiguous()}, None
    leaves, form = pytree.tree_flatten(inputs)
    tensors = {f"inputs.{k}": leaf.contiguous() for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    others = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    for leaf in others.values():
        if not isinstance(leaf, PLAIN):
            raise BadArgument("prepared", f"inputs hold a {type(leaf).__name__}, which is no tensor", "tensors")
    return tensors, {"form": pytree.treespec_dumps(form), "others": json.dumps(others)}


def _unpacked(tensors: Mapping[str, torch.Tensor], form: Mapping[str, str] | None) -> Inputs:
    """The inverse of `_packed`."""
    if not form or "form" not in form:
        return tensors["inputs"]
    others = {int(k): leaf for k, leaf in json.loads(form["others"]).items()}
    spec = pytree.treespec_loads(form["form"])
    leaves = [others[k] if k in others else tensors[f"inputs.{k}"] for k in range(spec.num_leaves)]
    return cast(Inputs, pytree.tree_unflatten(leaves, spec))


def _refuse_old(context: Context, ask: Ask) -> None:
    """Within a server's session rounds only go on, and every exchange is answered once."""
    last = context.state.get(SEEN)
    if not isinstance(last, ConfigRecord) or last["session"] != ask.session:
        return
    if last["token"] == ask.token:
        raise StaleUpdate("this node", f"it has answered this exchange of round {ask.round} already")
    if ask.round < int(str(last["round"])):
        raise StaleUpdate("this node", f"the message is of round {ask.round}, and a later one was answered")


def _defence(ask: Ask, own: Defence | None) -> PlainWire:
    """How this round's messages travel; the client's own defence must be of the server's kind, and not for tests."""
    wire = named_wire(ask.kind)
    if own is None:
        return wire
    if wire_of(own).kind != ask.kind:
        raise BadArgument("answer", f"the server's defence is {ask.kind!r}, this client insists on {own.name!r}")
    if own.repeatable:
        raise BadArgument("answer", f"{own.name} with a seed is for tests: on a network its secrets are none")
    return wire


def _build(wire: PlainWire, ask: Ask) -> Defence:
    try:
        return wire.build(ask.settings)
    except TypeError as error:
        raise BadArgument("ask", f"{ask.kind} has no such settings: {error}", "install the same fedveil") from error


def _loss(ask: Ask, own: Function | None) -> Loss:
    if own is not None:
        if find_loss(own).name != ask.loss:
            raise BadArgument("answer", f"the server's loss is {ask.loss!r}, the one given {find_loss(own).name!r}")
        return find_loss(own)
    known = named_loss(ask.loss, ask.loss_settings)
    if known is None:
        raise BadArgument("answer", f"the loss {ask.loss!r} is the server's own function", "answer(..., loss=it)")
    return known


def _dtype(ask: Ask) -> torch.dtype:
    """The dtype in which the model travels."""
    for name, array in ask.arrays.items():
        if name.startswith("parameter/"):
            return torch.from_numpy(array[:0].copy() if array.ndim else array.copy()).dtype
    raise BadArgument("ask", "it holds no parameters")


def _file(folder: Path, client: int) -> Path:
    return folder / f"fedveil-client-{client}.pt"


def _restore(defence: Defence, context: Context, folder: Path | None, client: int) -> None:
    """Give the defence what this client kept of its last round."""
    if folder is not None:
        if _file(folder, client).exists():
            defence.restore_client(0, checkpoint.load(_file(folder, client), torch.device("cpu")))
        return
    arrays, values = context.state.get(PRIVATE), context.state.get(PRIVATE + ".values")
    if isinstance(arrays, ArrayRecord) and isinstance(values, ConfigRecord):
        tensors = {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
        defence.restore_client(0, json.loads(str(values["json"])) | tensors)


def _keep(defence: Defence, context: Context, folder: Path | None, client: int) -> None:
    """Keep what this client needs in its next round and nobody else may have."""
    state = defence.client_state(0)
    if not state:
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        checkpoint.save(_file(folder, client), state)
        return
    tensors = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}
    size = sum(array.nbytes for array in tensors.values())
    if size > LARGEST_STATE:
        what = f"this client's private state has {size} bytes, and Flower's context keeps less"
        raise BadArgument("answer", what, "answer(..., folder=Path('a folder on this node'))")
    plain = {name: value for name, value in state.items() if name not in tensors}
    context.state[PRIVATE] = ArrayRecord({name: Array(array) for name, array in tensors.items()})
    context.state[PRIVATE + ".values"] = ConfigRecord({"json": json.dumps(plain)})
