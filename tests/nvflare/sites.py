"""FLARE's sites in this process: its own proxies, dispatchers, authoriser and serialiser; only the line is ours.

Uses what nvflare 2.9 keeps to itself: tests only, and constraints.txt pins the version.
"""

import contextlib
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong

from nvflare.apis.client import Client as Site
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.collab import collab
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.api.constants import FL_CONTEXT_PROP
from nvflare.collab.api.proxy import Proxy
from nvflare.collab.runtime.cell_dispatcher import CellDispatcher
from nvflare.collab.runtime.defs import CallHeaderKey, CallReplyKey
from nvflare.collab.runtime.dispatch import CollabCallAuthorizer, _call_app_method, make_participant_map
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.utils import fobs

from fedveil.nvflare import Client

LOG = logging.getLogger("tests.nvflare")
JOBS = itertools.count()  # FLARE keeps the names of a process's cells
SIMULATED = {"secure": False, "simulated": True}  # settings of a site's process
CERTIFIED = {"secure": True}


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


class Nowhere(Workspace):
    """A site's folders, which no test looks at."""

    def __init__(self):
        pass


class Process:
    """FLARE's process of a job on a site: its cell, and what it knows of itself. Nothing is connected.

    `security` is the project's `connection_security`, and `server` the address of the server, None behind a relay.
    """

    def __init__(self, name, *, secure, simulated=False, security=None, server="grpc://localhost:1"):
        credentials = {"connection_security": security} if security else {}
        parent = "tcp://localhost:1"
        self.core_cell = CoreCell(name, server, secure, credentials, create_internal_listener=False, parent_url=parent)
        self.core_cell._create_bb_external_connector()
        mode = {FLContextKey.SIMULATE_MODE: True} if simulated else {FLContextKey.SECURE_MODE: True}
        self.context = FLContextManager(self, private_stickers=mode).new_context()

    def get_cell(self):
        return self


class Cell:
    """Carries calls to one site. `faults` maps the number of its ask to a function of its result.

    `turn` is a lock for sites that must not work at the same time: torch.export is for one thread, and elsewhere each
    site is a process of its own.
    """

    def __init__(self, site, job, client, faults=None, turn=None, how=SIMULATED):
        self.turn = turn or contextlib.nullcontext()
        self.app, self.faults, self.down, self.counts = ClientApp(client), faults or {}, False, itertools.count()
        self.app.name, self.traffic = site.name, []
        self.fqcn = FQCN.join([site.get_fqcn(), job])
        self.process = Process(self.fqcn, **how)
        self.app.set_prop(FL_CONTEXT_PROP, self.process.context)
        self.pool = ThreadPoolExecutor(4)

    def start(self, participants, others, signal):
        """As FLARE's executor does it, with proxies of all sites."""
        self.authorizer = CollabCallAuthorizer(self.app, self.fqcn, participants, LOG)
        self.app.setup(Nowhere(), Proxy(self.app, "server", "server", None, {}), others, signal)
        self.app.initialize(self.app.new_context(self.app.name, self.app.name, set_call_ctx=False))

    def carry(self, origin, request, timeout):
        if self.down:
            return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.TARGET_UNREACHABLE}, None)
        try:
            return self.pool.submit(self._handled, origin, request).result(timeout)
        except TookTooLong:
            return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.TIMEOUT}, None)

    def _handled(self, origin, request):
        request.payload = fobs.loads(sent := fobs.dumps(request.payload))
        request.add_headers({MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.DESTINATION: self.fqcn})
        request.set_header(CallHeaderKey.AUTHENTICATED_CALLER, "server")  # as a liar would; FLARE overwrites it
        assert self.authorizer.authorize(request.headers) is None
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


class Line:
    """The cell of a caller, as its dispatcher sees it."""

    def __init__(self, origin, cell):
        self.origin, self.cell = origin, cell

    def get_fqcn(self):
        return self.origin

    def send_request(self, channel, target, topic, request, timeout, **_):
        return self.cell.carry(self.origin, request, timeout)


def proxy_of(app, origin, cell, signal):
    """An app's proxy of a site."""
    name = cell.app.name
    dispatcher = CellDispatcher(None, None, app.name, Line(origin, cell), name, signal, ThreadPoolExecutor(8))
    interface = cell.app.get_collab_interface()
    proxy = Proxy(app, name, name, dispatcher, interface.pop(""))
    for child, methods in interface.items():
        proxy.add_child(child, Proxy(app, f"{name}.{child}", "", dispatcher, methods))
    return proxy


def sites(clients, faults=None, turn=None, how=SIMULATED):
    """The server's proxies of sites by name, their cells, and the signal that aborts the job.

    `cells[name].app.client_proxies` are those that a site itself has. `how` are the settings of the sites' cells.
    """
    server, signal, faults, job = ServerApp(Main()), Signal(), faults or {}, f"job-{next(JOBS)}"
    origin = FQCN.join([FQCN.ROOT_SERVER, job])
    members = [Site(name, "") for name in clients]
    for number, site in enumerate(members):
        site.set_fqcn(f"relay.{number}")  # as of sites behind a relay, one of which may bear the server's name
    participants = make_participant_map(origin, job, members)
    cells = {
        site.name: Cell(site, job, client, {n: f for (who, n), f in faults.items() if who == site.name}, turn, how)
        for site, client in zip(members, clients.values(), strict=True)
    }
    for cell in cells.values():
        others = [proxy_of(cell.app, cell.fqcn, other, signal) for other in cells.values()]
        cell.start(participants, others, signal)
    return [proxy_of(server, origin, cell, signal) for cell in cells.values()], cells, signal
