"""A server whose clients are Flower nodes."""

from flwr.serverapp import Grid

from fedveil.federation.remote import RemoteServer
from fedveil.flower.engine import FlowerTransport


class Server(RemoteServer[Grid]):
    """A server whose clients are Flower nodes that run `fedveil.flower.answer`.

    The arguments are those of `RemoteServer`; the first is the grid that Flower passes to the `@app.main()` function.
    """

    def _connect(self, connection: Grid) -> FlowerTransport:
        return FlowerTransport(connection)
