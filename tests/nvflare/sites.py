"""FLARE's sites in this process: its own proxies, dispatchers and serialiser; only the cell between them is ours.

Uses what nvflare 2.9 keeps to itself: tests only, and constraints.txt pins the version.
"""

import contextlib
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong

from nvflare.apis.signal import Signal
from nvflare.collab import collab
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.api.proxy import Proxy
from nvflare.collab.runtime.cell_dispatcher import CellDispatcher
from nvflare.collab.runtime.defs import CallHeaderKey, CallReplyKey
from nvflare.collab.runtime.dispatch import _call_app_method
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.utils import fobs

from fedveil.nvflare import Client

LOG = logging.getLogger("tests.nvflare")


class Own(Client):
    """A client of a network and records that are at hand."""

    def __init__(self, build, data, number):
        self.build, self.data, self.place = build, data, number

    def make_model(self):
        return self.build()

    def load_data(self, site):
        return self.data() if callable(self.data) else self.data

    def number(self, site):
        return self.place


class Main:
    @collab.main
    def run(self):
        raise AssertionError("the tests call the server themselves")


class Cell:
    """Carries calls to one site. `faults` maps the number of its ask to a function of its result.

    `turn` is a lock for sites that must not work at the same time: torch.export is for one thread, and elsewhere each
    site is a process of its own.
    """

    def __init__(self, name, client, faults=None, turn=None):
        self.turn = turn or contextlib.nullcontext()
        self.app, self.faults, self.down, self.counts = ClientApp(client), faults or {}, False, itertools.count()
        self.app.name, self.traffic = name, []
        self.app.initialize(self.app.new_context("server", name))
        self.pool = ThreadPoolExecutor(4)

    def get_fqcn(self):
        return "server"

    def send_request(self, channel, target, topic, request, timeout, **_):
        if self.down:
            return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.TARGET_UNREACHABLE}, None)
        try:
            return self.pool.submit(self._handled, request).result(timeout)
        except TookTooLong:
            return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.TIMEOUT}, None)

    def _handled(self, request):
        request.payload = fobs.loads(sent := fobs.dumps(request.payload))
        request.set_header(CallHeaderKey.AUTHENTICATED_CALLER, "server")
        with self.turn:
            reply = _call_app_method(request, self.app, LOG)
        if request.get_header(CallHeaderKey.METHOD_NAME) == "answer":
            change = self.faults.get(next(self.counts), lambda result: result)
            if CallReplyKey.RESULT in reply.payload:
                reply.payload[CallReplyKey.RESULT] = change(reply.payload[CallReplyKey.RESULT])
        back = fobs.dumps(reply.payload)
        self.traffic += [sent, back]
        reply.payload = fobs.loads(back)
        return reply


def sites(clients, faults=None, turn=None):
    """Proxies of sites by name, with their cells in `.cells`, and the signal that aborts the job."""
    server, signal, faults = ServerApp(Main()), Signal(), faults or {}
    cells = {
        name: Cell(name, client, {n: f for (who, n), f in faults.items() if who == name}, turn)
        for name, client in clients.items()
    }
    proxies = []
    for name, cell in cells.items():
        dispatcher = CellDispatcher(None, None, "server", cell, name, signal, ThreadPoolExecutor(8))
        interface = cell.app.get_collab_interface()
        proxy = Proxy(server, name, name, dispatcher, interface.pop(""))
        for child, methods in interface.items():
            proxy.add_child(child, Proxy(server, f"{name}.{child}", "", dispatcher, methods))
        proxies.append(proxy)
    return proxies, cells, signal
