"""The server, which defines the model, its optimizer, its defence and its test data."""

from pathlib import Path
from typing import Any

import torch
from nvflare.collab import collab

from bank_flare.task import Settings, make_model
from fedveil.data import load
from fedveil.federation.progress import print_progress
from fedveil.nvflare import Server
from fedveil.runs.folder import record_run


class BankServer:
    """A server that trains, resuming from the last checkpoint if there is one, and writes the run's folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    @collab.main
    def run(self) -> None:
        """Train; FLARE calls this once all sites are connected."""
        asked = Settings(**self.settings)
        out, epochs = Path(asked.out), max(1, asked.rounds // asked.rounds_per_epoch)
        data = load(asked.data)
        server = Server(
            collab.clients,
            make_model(asked),
            data.test.inputs[:2],
            asked.defence,
            lambda p: torch.optim.Adam(p, asked.lr, betas=(0.9, 0.99), weight_decay=asked.weight_decay),
            schedule=(
                (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs))
                if asked.schedule == "cosine"
                else None
            ),
            loss="squared_error",
            whole_shard=asked.whole_shard,
            batch_size=asked.batch_size,
            rounds_per_epoch=asked.rounds_per_epoch,
            wait_for=asked.sites,
            min_answers=asked.min_answers,
            timeout=asked.timeout,
            secure_aggregation=asked.secure_aggregation,
            seed=asked.seed,
        )
        values = {**self.settings, "clients": asked.sites, "model": "mlp"}
        repeat = "python examples/nvflare_app/job.py"
        how = {"rounds": asked.rounds, "resume": True, "on_round": print_progress(asked.rounds)}
        print(record_run(server, out, data, values, repeat, **how).to_dict(), flush=True)
        server.close()
