"""The server's side: the rounds of `fedveil.federation.rounds` with clients that are Flower nodes."""

from typing import Any

from flwr.serverapp import Grid
from torch import nn

from fedveil.federation.rounds import RemoteServer
from fedveil.flower.engine import FlowerEngine
from fedveil.graph.inputs import Inputs


class Server(RemoteServer):
    """A federation whose clients are Flower nodes that run `fedveil.flower.answer`.

    Args:
        grid: Flower's, from `@app.main()`.
        model: the server's; trained in place.
        example: see `RemoteServer`, as for all others.
        *given: of `RemoteServer`.
        **named: of `RemoteServer`.
    """

    def __init__(self, grid: Grid, model: nn.Module, example: Inputs, *given: Any, **named: Any) -> None:
        super().__init__(FlowerEngine(grid), model, example, *given, **named)
        self.grid = grid
