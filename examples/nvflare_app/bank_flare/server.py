"""The server, which defines the model, its optimizer, its defence and its test data."""

from pathlib import Path
from typing import Any

import torch
from nvflare.collab import collab

from bank_flare.task import Settings, make_model
from fedveil.data import load
from fedveil.federation.progress import print_progress
from fedveil.federation.results import RunDetails
from fedveil.nvflare import Server


class BankServer:
    """A server that trains, resuming from the last checkpoint if there is one, and writes the run's folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    @collab.main
    def run(self) -> None:
        """Train; FLARE calls this once all sites are connected."""
        settings = Settings(**self.settings)
        out, epochs = Path(settings.out), max(1, settings.rounds // settings.rounds_per_epoch)
        data = load(settings.data)
        server = Server(
            collab.clients,
            make_model(settings),
            data.test.inputs[:2],
            settings.defence,
            lambda p: torch.optim.Adam(p, settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay),
            schedule=(
                (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs))
                if settings.schedule == "cosine"
                else None
            ),
            loss="squared_error",
            whole_shard=settings.whole_shard,
            batch_size=settings.batch_size,
            rounds_per_epoch=settings.rounds_per_epoch,
            wait_for=settings.sites,
            min_answers=settings.min_answers,
            timeout=settings.timeout,
            secure_aggregation=settings.secure_aggregation,
            seed=settings.seed,
        )
        server.fit(
            rounds=settings.rounds,
            test=(data.test.inputs, data.test.targets),
            folder=out,
            resume=True,
            on_round=print_progress(settings.rounds),
            details=RunDetails(f"{settings.data}, mlp", self.settings, encoding=data.encoding),
        )
        server.close()
