"""A server whose clients are the sites of a FLARE job."""

from collections.abc import Sequence

from nvflare.collab.api.proxy import Proxy

from fedveil.federation.remote import RemoteServer
from fedveil.nvflare.client import decline_direct_connections
from fedveil.nvflare.engine import FlareTransport


class Server(RemoteServer[Sequence[Proxy]]):
    """A server whose clients are FLARE sites, each with a `fedveil.nvflare.Client`. Create it in a job's main.

    The arguments are those of `RemoteServer`; the first is `collab.clients`.
    """

    def _connect(self, connection: Sequence[Proxy]) -> FlareTransport:
        decline_direct_connections()  # otherwise a site could answer in another's name
        return FlareTransport(connection)
