"""A server that writes what the tests compare."""

import json
from pathlib import Path

import torch
from flwr.serverapp import ServerApp
from safetensors.torch import save_file

from fedveil.defences import Plain, Veil
from fedveil.flower import Server
from veiltest.task import images, make_model, parts

app = ServerApp()


class Leaky(Veil):
    """Writes each round's secret to a file of the test's."""

    def __init__(self, path):
        super().__init__(groups=3, additive=100.0)
        self.path = Path(path)

    def each(self, updates):
        secret = self._secret
        known = torch.cat([secret._head.direction.double(), torch.ones(1, dtype=torch.float64)]).tolist()
        coefficients = secret._undo.coefficients
        gamma = [offset - c for offset, c in zip(secret._head.offset.tolist(), coefficients[1:-1], strict=True)]
        numbers = [*secret._noise.scale.tolist(), *gamma, *coefficients]
        numbers += secret._undo.cover.factors.double().tolist()
        line = {"secret": sorted({x for x in numbers if abs(x) != 1}), "public": known[:-1]}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return super().each(updates)


def defence_of(config):
    if config["defence"] == "plain":
        return Plain()
    return Leaky(config["secrets"]) if config["secrets"] else Veil(groups=3, additive=100.0)


@app.main()
def main(grid, context):
    config, out = context.run_config, Path(context.run_config["out"])
    data = parts()[0] if config["net"] == "mlp" else images(0)
    server = Server(
        grid,
        make_model(config),
        data[0][:2],
        defence_of(config),
        lambda p: torch.optim.Adam(p, 1e-2),
        batch_size=32,
        wait_for=config["wait-for"],
        min_answers=config["min-answers"],
        timeout=config["timeout"],
        patience=config["patience"],
        attempts=config["attempts"],
        pause=0.5,
    )
    if (out / "checkpoint.pt").exists():
        server.resume(out)
    started = server.round

    def log(record):
        with (out / "records.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)

    server.fit(rounds=config["rounds"], folder=out, checkpoint_every=1, on_round=log)
    save_file(server.model.state_dict(), out / "model.safetensors")
    (out / "done.json").write_text(json.dumps({"from": started, "to": server.round}))
