"""A server whose clients are Flower nodes."""

from flwr.serverapp import Grid

from fedveil.federation.remote import RemoteServer
from fedveil.flower.engine import FlowerTransport


class Server(RemoteServer[Grid]):
    """A federation whose clients are Flower nodes that run `fedveil.flower.answer`.

    Args are those of `RemoteServer`; the first is Flower's grid, which the function with `@app.main()` receives.
    """

    def _connect(self, connection: Grid) -> FlowerTransport:
        return FlowerTransport(connection)
