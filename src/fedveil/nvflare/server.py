"""A server whose clients are the sites of a FLARE job."""

from collections.abc import Sequence

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.collab import collab
from nvflare.collab.api.proxy import Proxy
from nvflare.widgets.info_collector import InfoCollector

from fedveil.federation.progress import describe_progress
from fedveil.federation.remote import RemoteServer
from fedveil.nvflare.client import decline_direct_connections
from fedveil.nvflare.engine import FlareTransport

GROUP, PROGRESS = "fedveil", "progress"  # keys in the statistics of a job


class ProgressReporter(FLComponent):  # type: ignore[misc]
    """Adds a server's progress to the statistics of its job, which FLARE's console and `submit` show."""

    def __init__(self, server: "Server") -> None:
        super().__init__()
        self._server = server

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Add the progress if statistics are collected."""
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            collector.set_info(GROUP, {PROGRESS: describe_progress(self._server)})


class Server(RemoteServer[Sequence[Proxy]]):
    """A server whose clients are FLARE sites, each with a `fedveil.nvflare.Client`. Create it in a job's main.

    The arguments are those of `RemoteServer`; the first is `collab.clients`.
    """

    def _connect(self, connection: Sequence[Proxy]) -> FlareTransport:
        decline_direct_connections()  # otherwise a site could answer in another's name
        collab.fl_ctx.get_engine().run_manager.add_handler(ProgressReporter(self))
        return FlareTransport(connection)
