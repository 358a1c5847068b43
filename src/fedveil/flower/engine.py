"""Flower's grid as a transport: send messages to nodes, collect replies, and name what goes wrong."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedveil.errors import BadArgument
from fedveil.federation.engines import Fault, FaultKind, Member
from fedveil.flower.wrapping import unwrap, wrap

MIN_POLL, MAX_POLL = 0.005, 0.5  # seconds between two looks for replies
POLL_FRACTION = 0.05  # of the time waited so far: the most that polling adds to a round


def push(grid: Grid, content: RecordDict, nodes: Sequence[int], group: str, ttl: float) -> dict[str, int]:
    """Send the same content to every node; return the node of each message by the message's id."""
    messages = [Message(content, dst_node_id=n, message_type="train", group_id=group, ttl=ttl) for n in nodes]
    grid.push_messages(messages)
    return {message.metadata.message_id: message.metadata.dst_node_id for message in messages}


def collect(grid: Grid, sent: Mapping[str, int], timeout: float) -> Iterator[tuple[int, Message | Fault]]:
    """Yield the first reply or fault of each node as it arrives; nodes are silent after `timeout` seconds."""
    start, pending = time.monotonic(), dict(sent)
    deadline = start + timeout
    while pending:
        for message, node in list(pending.items()):
            for reply in _pull(grid, message, node):
                if isinstance(reply, Fault):
                    del pending[message]
                    yield node, reply
                elif reply.metadata.reply_to_message_id != message:
                    yield (
                        node,
                        Fault(node, FaultKind.FOREIGN, "it answers a message that was not sent to it in this round"),
                    )
                elif message not in pending:
                    yield node, Fault(node, FaultKind.TWICE, "only its first answer counts")
                else:
                    del pending[message]
                    yield node, _check_sender(node, reply)
        now = time.monotonic()
        if not pending or now >= deadline:
            break
        poll = min(max(MIN_POLL, POLL_FRACTION * (now - start)), MAX_POLL)
        time.sleep(max(0.0, min(poll, deadline - now)))
    for node in pending.values():
        yield node, Fault(node, FaultKind.SILENT, f"no answer within {timeout:g} s")


def _pull(grid: Grid, message: str, node: int) -> Iterable[Message | Fault]:
    """Return the replies to one message: pulled separately, so that an unreadable reply affects no other node."""
    try:
        return list(grid.pull_messages([message]))
    except httpx.HTTPError:
        raise  # the SuperLink has been gone for longer than Flower retries: not the node's fault
    except Exception as error:  # Flower's decoder raises anything on garbage
        return [Fault(node, FaultKind.UNREADABLE, f"{type(error).__name__}: {error}")]


def _check_sender(node: int, reply: Message) -> Message | Fault:
    """Return the reply, or a fault: an error of Flower, which the SuperLink may send, or another node's reply."""
    if reply.has_error():
        return Fault(node, FaultKind.ENGINE_ERROR, f"{reply.error.code}: {reply.error.reason}")
    if reply.metadata.src_node_id != node:
        return Fault(node, FaultKind.FOREIGN, f"the answer comes from node {reply.metadata.src_node_id}")
    return reply


def _read_content(node: int, reply: Message) -> bytes | Fault:
    try:
        return unwrap(reply.content, "answer")
    except BadArgument as error:
        return Fault(node, FaultKind.MALFORMED, f"{error.where}: {error.what}")


class FlowerTransport:
    """The nodes of a Flower federation, through the grid of a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def members(self) -> list[Member]:
        """Return the nodes that are connected."""
        return [*sorted(self.grid.get_node_ids())]

    def ask(
        self, common: bytes, own: Mapping[Member, bytes], *, label: str, timeout: float
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """See `Transport.ask`; messages expire with the exchange."""
        sent: dict[str, int] = {}
        for extra in dict.fromkeys(own.values()):
            nodes = [int(node) for node, bytes_ in own.items() if bytes_ == extra]
            sent |= push(self.grid, wrap(common, extra), nodes, label, timeout)
        for node, reply in collect(self.grid, sent, timeout):
            yield node, reply if isinstance(reply, Fault) else _read_content(node, reply)

    def close(self) -> None:
        """Do nothing: Flower ends the run."""
