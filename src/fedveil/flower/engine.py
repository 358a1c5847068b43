"""Flower's grid as a transport: send messages to nodes, collect their replies, and report faults."""

import time
from collections.abc import Iterable, Iterator, Mapping

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedveil.errors import BadArgument
from fedveil.federation.protocol import Fault, FaultKind, Member
from fedveil.flower.wrapping import unwrap, wrap

MIN_POLL, MAX_POLL = 0.005, 0.5  # seconds between polls for replies
POLL_FRACTION = 0.05  # maximum delay caused by polling, relative to the time waited so far


class FlowerTransport:
    """The nodes of a Flower federation, through the grid of a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def members(self) -> list[Member]:
        """Return the connected nodes."""
        return [*sorted(self.grid.get_node_ids())]

    def ask(
        self, common: bytes, extras: Mapping[Member, bytes], *, label: str, timeout: float
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """See `Transport.ask`; messages expire with the exchange."""
        node_by_message: dict[str, int] = {}
        for extra in dict.fromkeys(extras.values()):
            content, nodes = (
                wrap(common, extra),
                [int(node) for node, node_extra in extras.items() if node_extra == extra],
            )
            messages = [Message(content, node, "train", ttl=timeout, group_id=label) for node in nodes]
            self.grid.push_messages(messages)
            node_by_message |= {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        return collect(self.grid, node_by_message, timeout)

    def close(self) -> None:
        """Do nothing: Flower ends the run."""


def collect(grid: Grid, node_by_message: Mapping[str, int], timeout: float) -> Iterator[tuple[Member, bytes | Fault]]:
    """Yield the first reply or fault of each node as it arrives; a node without a reply in time is silent.

    Args:
        grid: Flower's grid.
        node_by_message: the node of each message, by message id.
        timeout: timeout in seconds.
    """
    start, pending = time.monotonic(), dict(node_by_message)
    deadline = start + timeout
    while pending:
        for message, node in list(pending.items()):
            for reply in _pull(grid, message, node):
                if not isinstance(reply, Fault) and reply.metadata.reply_to_message_id != message:
                    problem = "the node answered a message that was not sent to this node in this round"
                    yield node, Fault(node, FaultKind.FOREIGN, problem)
                elif message not in pending:
                    yield node, Fault(node, FaultKind.TWICE, "only its first answer counts")
                else:
                    del pending[message]
                    yield node, reply if isinstance(reply, Fault) else _read_reply(node, reply)
        now = time.monotonic()
        if not pending or now >= deadline:
            break
        poll = min(max(MIN_POLL, POLL_FRACTION * (now - start)), MAX_POLL)
        time.sleep(max(0.0, min(poll, deadline - now)))
    for node in pending.values():
        yield node, Fault(node, FaultKind.SILENT, f"no answer within {timeout:g} s")


def _pull(grid: Grid, message: str, node: int) -> Iterable[Message | Fault]:
    """Pull the replies to one message; replies to others are pulled separately, in case one cannot be read."""
    try:
        return list(grid.pull_messages([message]))
    except httpx.HTTPError:
        raise  # the SuperLink was down for longer than Flower retries, so this is not the node's fault
    except Exception as error:  # Flower's decoder may raise any exception on malformed bytes
        return [Fault(node, FaultKind.UNREADABLE, f"{type(error).__name__}: {error}")]


def _read_reply(node: int, reply: Message) -> bytes | Fault:
    """Return the bytes of a reply, or a fault if Flower reports an error or the reply is from another node."""
    if reply.has_error():
        return Fault(node, FaultKind.ENGINE_ERROR, f"{reply.error.code}: {reply.error.reason}")
    if reply.metadata.src_node_id != node:
        return Fault(node, FaultKind.FOREIGN, f"the answer comes from node {reply.metadata.src_node_id}")
    try:
        return unwrap(reply.content, "answer")[0]
    except BadArgument as error:
        return Fault(node, FaultKind.MALFORMED, f"{error.where}: {error.what}")
