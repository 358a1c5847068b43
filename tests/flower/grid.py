"""A Flower grid in this process: real Messages and ClientApps, full serialisation both ways, faults on demand.

Uses what flwr 1.41 keeps to itself (TaskIdentity, inflate): tests only, and constraints.txt pins the version.
"""

import itertools

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def over_the_wire(message):
    """The message as it comes out at the other end."""
    contents = {key: piece.deflate() for key, piece in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


class LocalGrid(Grid):
    """Nodes 100, 101 ... that run a ClientApp at once.

    `faults` maps (node, number of its message) to a function of the reply and its message; what it returns, a list of
    replies, is what the server can pull. `down` are nodes that are listed but do not answer.
    """

    def __init__(self, app, nodes, run_config=None, faults=None):
        self.app, self.faults, self.down = app, faults or {}, set()
        configs = {100 + k: {"partition-id": k, "num-partitions": nodes} for k in range(nodes)}
        self.contexts = {n: Context(1, n, own, RecordDict(), run_config or {}) for n, own in configs.items()}
        self.counts = {node: itertools.count() for node in self.contexts}
        self.sent, self.replies = [], {}

    def set_run(self, run):
        pass

    @property
    def run(self):
        return None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.sent.append(message)
            self.replies[message.metadata.message_id] = self._handle(message)
        return [message.metadata.message_id for message in messages]

    def _handle(self, message):
        node = message.metadata.dst_node_id
        number = next(self.counts[node])
        if node in self.down:
            return []
        arrived = over_the_wire(message)
        try:
            reply = self.app(arrived, self.contexts[node])
        except Exception as error:
            reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=arrived)
        change = self.faults.get((node, number))
        replies = change(reply, message) if change else [reply]
        for one in replies:
            if isinstance(one, Message):
                one.metadata.__dict__["_message_id"] = one.object_id
        return replies

    def pull_messages(self, message_ids):
        found = []
        for key in message_ids:
            waiting, self.replies[key] = self.replies.get(key, []), []
            for reply in waiting:
                if isinstance(reply, Exception):
                    raise reply
                found.append(over_the_wire(reply))
        return found

    def sent_bytes(self):
        """The content of all messages to nodes."""
        records = [record for message in self.sent for record in message.content.array_records.values()]
        return b"".join(array.data for record in records for array in record.values())

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        return self.pull_messages(self.push_messages(messages))


def parts(sizes=(30, 20, 25), features=6, outputs=4, classes=None, dtype=torch.float64):
    """Each client's records."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        inputs = torch.randn(size, features, generator=generator, dtype=torch.float64).to(dtype)
        numbers = torch.randn(size, outputs, generator=generator, dtype=torch.float64).to(dtype)
        found.append((inputs, numbers.argmax(1) if classes else numbers))
    return found
