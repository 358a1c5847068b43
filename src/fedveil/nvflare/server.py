"""The server's side: the rounds of `fedveil.federation.rounds` with clients that are sites of a FLARE job."""

from typing import Any

from nvflare.collab import collab
from torch import nn

from fedveil.federation.rounds import RemoteServer
from fedveil.graph.inputs import Inputs
from fedveil.nvflare.engine import FlareEngine
from fedveil.nvflare.transport import decline_direct_connections


class Server(RemoteServer):
    """A federation whose clients are FLARE sites, each with a `fedveil.nvflare.Client`. For use inside of a job's main.

    Args:
        model: the server's; trained in place.
        example: see `RemoteServer`, as for all others.
        *given: of `RemoteServer`.
        **named: of `RemoteServer`.
    """

    def __init__(self, model: nn.Module, example: Inputs, *given: Any, **named: Any) -> None:
        decline_direct_connections()  # or a site could answer in another's name
        super().__init__(FlareEngine(collab.clients), model, example, *given, **named)
