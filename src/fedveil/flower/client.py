"""The client side of a Flower app, which answers the server's messages."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import nn

from fedveil.defences.interface import AnyDefence
from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import load_private_state, save_private_state
from fedveil.federation.client import ClientSession, ClientState
from fedveil.federation.prepare import OwnRecords
from fedveil.federation.protocol import LastRequest, hide_failures
from fedveil.flower.wrapping import unwrap, wrap
from fedveil.graph.build import Frozen
from fedveil.graph.outputs import Output
from fedveil.records.sources import UserRecords
from fedveil.scheme.losses import Function
from fedveil.secagg import Party
from fedveil.secagg.environment import load_own_party, load_own_policy
from fedveil.wire import from_bytes, to_bytes

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

LAST_KEY, PRIVATE_KEY = "fedveil.last", "fedveil.private"
SUPERLINK = 1  # the node id of a ServerApp
MAX_STATE_SIZE = 2**24  # bytes; Flower silently drops larger states


def answer(
    message: Message,
    context: Context,
    model: nn.Module,
    data: OwnRecords,
    *,
    defence: AnyDefence | None = None,
    loss: Function | None = None,
    output: Output | None = None,
    frozen: Frozen = "sent",
    client: int | None = None,
    folder: Path | None = None,
    party: Party | None = None,
) -> Message:
    """Return a ClientApp's reply to a message from `fedveil.flower.Server`.

    Args:
        message: the message.
        context: Flower's context, which stores the number of the last round and this client's private state.
        model: a model with the server's architecture; its values are neither used nor changed.
        data: this client's (inputs, targets), or a function that loads them, which is called after the message has
            been checked. Inputs have the same form as the server's `example` (docs/inputs.md).
        defence: a defence whose settings (for example PPDL's noise) override the server's.
        loss: the loss function, if the server uses a custom one.
        output: the function that computes the predictions, if the server uses one.
        frozen: "local" to use this model's own frozen parameters if the server does not send them.
        client: the index of this client, which determines the order of its batches; by default, the node's
            `partition-id`.
        folder: a folder on the node for private state (SPN's head, PPDL's noise generator), instead of Flower's
            context, which is lost when the SuperNode or the run ends.
        party: the client's side of secure aggregation; by default, it is created from FEDVEIL_IDENTITY, FEDVEIL_ROSTER
            and FEDVEIL_POLICY in the node's environment. A party without a memory on disk must exist for the whole run.

    Raises:
        FedveilError: the message is stale, malformed or for another model; Flower reports this to the server.
    """
    if message.metadata.src_node_id != SUPERLINK:
        problem = f"the message comes from node {message.metadata.src_node_id}, not from the server"
        raise BadArgument("message", problem, "send the message with fedveil.flower.Server")
    if client is None:
        client = int(str(context.node_config.get("partition-id", context.node_id)))
    path = folder / f"fedveil-client-{client}.pt" if folder is not None else None
    with hide_failures():  # Flower sends the text of an exception, which may contain records, to the server
        session = ClientSession(
            model,
            data,
            client=client,
            defence=defence,
            loss=loss,
            output=output,
            frozen=frozen,
            party=party or load_own_party(),
            policy=load_own_policy(),
            state=_load_state(context, path),
        )
        reply = session.reply(*unwrap(message.content, "request"))
    _save_state(session.state, context, path)
    return Message(content=wrap(reply), reply_to=message)


def client_app(
    make_model: Callable[[Context], nn.Module],
    load_data: Callable[[Context], UserRecords],
    *,
    defence: Callable[[], AnyDefence] | None = None,
    loss: Function | None = None,
    output: Output | None = None,
    frozen: Frozen = "sent",
    folder: Callable[[Context], Path] | None = None,
    party: Callable[[Context], Party] | None = None,
) -> "ClientApp":
    """Return a complete ClientApp.

    Args:
        make_model: builds the model.
        load_data: loads a node's records.
        defence: see `answer`.
        loss: see `answer`.
        output: see `answer`.
        frozen: see `answer`.
        folder: see `answer`.
        party: see `answer`; called once for each node.
    """
    from flwr.clientapp import ClientApp

    parties: dict[int, Party] = {}

    def train(message: Message, context: Context) -> Message:
        if party and context.node_id not in parties:
            parties[context.node_id] = party(context)
        return answer(
            message,
            context,
            make_model(context),
            lambda: load_data(context),
            defence=defence() if defence else None,
            loss=loss,
            output=output,
            frozen=frozen,
            folder=folder(context) if folder else None,
            party=parties.get(context.node_id),
        )

    app = ClientApp()
    app.train()(train)
    return app


def _load_state(context: Context, path: Path | None) -> ClientState:
    last_record, private_record = context.state.get(LAST_KEY), context.state.get(PRIVATE_KEY)
    private_state = load_private_state(path)
    if path is None and isinstance(private_record, ConfigRecord):
        values, tensors = from_bytes(cast(bytes, private_record["state"]), "state")
        private_state = values | tensors
    if not isinstance(last_record, ConfigRecord):
        return ClientState(None, private_state)
    return ClientState(
        LastRequest(str(last_record["session"]), int(str(last_record["round"])), str(last_record["token"])),
        private_state,
    )


def _save_state(state: ClientState, context: Context, path: Path | None) -> None:
    if state.private and path is not None:
        save_private_state(path, state.private)
    elif state.private:
        _save_to_context(state.private, context)
    if state.last is not None:
        context.state[LAST_KEY] = ConfigRecord(vars(state.last))


def _save_to_context(private_state: Mapping[str, object], context: Context) -> None:
    tensors = {name: value for name, value in private_state.items() if isinstance(value, torch.Tensor)}
    data = to_bytes("state", {name: value for name, value in private_state.items() if name not in tensors}, tensors)
    if len(data) > MAX_STATE_SIZE:
        message = (
            f"this client's private state has {len(data)} bytes, but Flower's context can hold at most {MAX_STATE_SIZE}"
        )
        raise BadArgument("answer", message, "pass a folder on the node: answer(..., folder=Path(...))")
    context.state[PRIVATE_KEY] = ConfigRecord({"state": data})
