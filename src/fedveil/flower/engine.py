"""Flower's grid as an engine: asking nodes and collecting what comes back: answers, errors, silence, garbage."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedveil.errors import BadArgument
from fedveil.federation.engine import Fault, Member, fault
from fedveil.flower.carry import unwrap, wrap

SHORTEST_POLL, LONGEST_POLL = 0.005, 0.5  # seconds
POLL_SHARE = 0.05  # of the time waited so far: what a late look can add to a round


def push(grid: Grid, content: RecordDict, nodes: Sequence[int], group: str, ttl: float) -> dict[str, int]:
    """Send the same content to every node; returns the node of each message that went out."""
    messages = [Message(content, dst_node_id=n, message_type="train", group_id=group, ttl=ttl) for n in nodes]
    grid.push_messages(messages)
    return {message.metadata.message_id: message.metadata.dst_node_id for message in messages}


def _pull(grid: Grid, message: str, node: int) -> Iterable[Message | Fault]:
    """Replies to one message. One at a time, so that a reply that cannot be read takes no other with it."""
    try:
        return list(grid.pull_messages([message]))
    except httpx.HTTPError:
        raise  # the SuperLink is gone for longer than Flower tries again: no node's fault
    except Exception as error:  # Flower raises whatever garbage makes of its decoder
        return [fault(node, "unreadable", f"{type(error).__name__}: {error}")]


def collect(grid: Grid, asked: Mapping[str, int], timeout: float) -> Iterator[tuple[int, Message | Fault]]:
    """Each node's first answer or fault as it comes; after `timeout` seconds those that are missing are silent."""
    began, pending = time.monotonic(), dict(asked)
    deadline = began + timeout
    while pending:
        for message, node in list(pending.items()):
            for reply in _pull(grid, message, node):
                if isinstance(reply, Fault):
                    del pending[message]
                    yield node, reply
                elif reply.metadata.reply_to_message_id != message:
                    yield node, fault(node, "foreign", "it answers a message that was not sent to it in this round")
                elif message not in pending:
                    yield node, fault(node, "twice", "only its first answer counts")
                else:
                    del pending[message]
                    yield node, _sorted_out(node, reply)
        if not pending or time.monotonic() >= deadline:
            break
        now = time.monotonic()
        poll = min(max(SHORTEST_POLL, POLL_SHARE * (now - began)), LONGEST_POLL)
        time.sleep(max(0.0, min(poll, deadline - now)))
    for node in pending.values():
        yield node, fault(node, "silent", f"no answer within {timeout:g} s")


def _sorted_out(node: int, reply: Message) -> Message | Fault:
    """The reply, or why it is none: Flower's own errors come from node 1, the SuperLink."""
    if reply.has_error():
        return fault(node, f"error {reply.error.code}", reply.error.reason)
    if reply.metadata.src_node_id != node:
        return fault(node, "foreign", f"the answer comes from node {reply.metadata.src_node_id}")
    return reply


class FlowerEngine:
    """Nodes of a Flower federation, through the grid that `@app.main()` gets."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def members(self) -> list[Member]:
        """The nodes that are connected."""
        return [*sorted(self.grid.get_node_ids())]

    def ask(
        self, common: bytes, own: Mapping[Member, bytes], *, label: str, timeout: float
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """See `Engine.ask`; messages live as long as the exchange."""
        asked: dict[str, int] = {}
        for extra in dict.fromkeys(own.values()):
            nodes = [int(node) for node, given in own.items() if given == extra]
            asked |= push(self.grid, wrap(common, extra), nodes, label, timeout)
        for node, reply in collect(self.grid, asked, timeout):
            yield node, reply if isinstance(reply, Fault) else _content(node, reply)

    def close(self) -> None:
        """Nothing to do: Flower ends the run."""


def _content(node: int, reply: Message) -> bytes | Fault:
    try:
        return unwrap(reply.content, "answer")
    except BadArgument as error:
        return fault(node, "malformed", f"{error.where}: {error.what}")
