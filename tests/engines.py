"""An engine in this process: members are functions of bytes; faults on demand."""

import itertools

from fedveil.federation.client import ClientSession
from fedveil.federation.protocol import Fault, FaultKind
from fedveil.federation.remote import RemoteServer


def member(build, data, client, party=None):
    """A client that keeps its own state; `party` makes its part in secure aggregation."""
    return ClientSession(build(), data, client=client, party=party).reply


class LoopbackServer(RemoteServer):
    """A server whose connection is a `Loopback`."""

    def _connect(self, connection):
        return connection


class Loopback:
    """Members by name; `faults` maps (member, number of its ask) to a function of its answer's bytes.

    A fault returns other bytes, a `Fault` of the engine, or None for silence.
    """

    def __init__(self, members, faults=None):
        self.answers, self.faults, self.down, self.closed = members, faults or {}, set(), False
        self.counts = {name: itertools.count() for name in members}
        self.asked, self.own = [], []

    def members(self):
        return [name for name in self.answers if name not in self.down]

    def ask(self, common, own, *, label, timeout):
        for name, extra in own.items():
            self.asked.append(name)
            self.own.append(extra)
            number = next(self.counts[name])
            try:
                found = self.answers[name](common, extra)
            except Exception as error:
                yield name, Fault(name, FaultKind.RAISED, f"{type(error).__name__}: {error}")
                continue
            change = self.faults.get((name, number), lambda data: data)
            found = change(found)
            yield name, Fault(name, FaultKind.SILENT, f"no answer within {timeout:g} s") if found is None else found

    def close(self):
        self.closed = True
