"""The server's side: the rounds of `fedveil.federation.rounds` with Flower nodes as clients."""

import torch
from flwr.serverapp import Grid
from torch import nn

from fedveil.defences.interface import AnyDefence
from fedveil.federation.limits import Limits
from fedveil.federation.optimise import Optimizer, Schedule
from fedveil.federation.rounds import RemoteServer
from fedveil.flower.engine import FlowerEngine
from fedveil.graph.inputs import Inputs
from fedveil.scheme.losses import Function, Loss
from fedveil.secagg import Identity, Roster


class Server(RemoteServer):
    """A federation whose clients are Flower nodes that run `fedveil.flower.answer`.

    Args:
        grid: Flower's grid, an argument of the function under `@app.main()`.
        model: the server's model; trained in place.
        example: the inputs of two records or more, for the analysis of the model; values do not matter.
        defence: see `RemoteServer` for this and all other arguments.
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        example: Inputs,
        defence: str | AnyDefence = "veil",
        optimizer: Optimizer = torch.optim.Adam,
        *,
        schedule: Schedule | None = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        loss: str | Loss | Function | None = None,
        whole_shard: bool = True,
        batch_size: int = 1024,
        rounds_per_epoch: int = 1,
        participation: float = 1.0,
        limits: Limits | None = Limits(),  # noqa: B008  (it is frozen)
        min_answers: int = 1,
        wait_for: int | None = None,
        timeout: float = 600.0,
        patience: float = 1800.0,
        attempts: int = 5,
        pause: float = 2.0,
        secure_aggregation: bool | Roster = False,
        identity: Identity | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            FlowerEngine(grid),
            model,
            example,
            defence,
            optimizer,
            schedule=schedule,
            schedule_every=schedule_every,
            clip_norm=clip_norm,
            loss=loss,
            whole_shard=whole_shard,
            batch_size=batch_size,
            rounds_per_epoch=rounds_per_epoch,
            participation=participation,
            limits=limits,
            min_answers=min_answers,
            wait_for=wait_for,
            timeout=timeout,
            patience=patience,
            attempts=attempts,
            pause=pause,
            secure_aggregation=secure_aggregation,
            identity=identity,
            seed=seed,
        )
        self.grid = grid
