"""The server of the test app, whatever engine it runs on: it writes what the tests compare."""

import json
import os
import signal
import time
import tomllib
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.deployed.task import make_model, parts

from fedveil import Privacy
from fedveil.defences import Plain, Veil
from fedveil.secagg import Identity, Roster

DEFAULTS = {
    "rounds": 2,
    "defence": "veil",
    "net": "mlp",
    "out": "",
    "wait-for": 3,
    "min-answers": 1,
    "timeout": 300.0,
    "patience": 300.0,
    "attempts": 5,
    "faults": "",  # "part:round:kind ..."
    "marks": "",  # folder in which clients say that they have begun a round
    "secrets": "",  # file into which the server writes what nobody should get
    "work": 0.0,  # seconds that a client sleeps
    "capture": "",  # folder into which clients write what they were sent
    "keys": "",  # folder of identities and roster, for secure aggregation
    "privacy": "",  # arguments of `fedveil.Privacy`, as TOML: FLARE replaces text in braces
    "tap": "",  # folder into which the server writes what it receives
    "evaluate-every": 0,  # rounds; then the server records its run, and resumes it
    "kill-at": 0,  # round after which the server kills itself
}
"""The configuration of the test app."""


class Leaky(Veil):
    """Writes each round's secret to a file of the test's."""

    def __init__(self, path):
        super().__init__(groups=3, additive=100.0)
        self.path = Path(path)

    def server(self, model, example, loss):
        found = super().server(model, example, loss)
        start = found.start_round

        def start_round(model, members=None):
            own = start(model, members)
            self.leak(own.perturbation)
            return own

        found.start_round = start_round
        return found

    def leak(self, perturbation):
        recovery, head = perturbation.recovery, perturbation.broadcast.head
        coefficients = recovery.coefficients
        gamma = [offset - c for offset, c in zip(head.offset.tolist(), coefficients[1:-1], strict=True)]
        numbers = [*recovery.transform.scale.double().tolist(), *gamma, *coefficients]
        numbers += recovery.transform.factors.double().tolist()
        line = {"secret": sorted({x for x in numbers if abs(x) != 1}), "public": head.direction.double().tolist()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def defence_of(config):
    if config["privacy"]:
        return Veil(multiplicative=1.0, decoys=2)
    if config["defence"] == "plain":
        return Plain()
    return Leaky(config["secrets"]) if config["secrets"] else Veil(groups=3, additive=100.0)


class Tapped:
    """An engine whose answers are written to a folder."""

    def __init__(self, engine, folder):
        self.engine, self.folder, self.members, self.close = engine, folder, engine.members, engine.close

    def ask(self, common, own, *, label, timeout):
        for member, reply in self.engine.ask(common, own, label=label, timeout=timeout):
            if isinstance(reply, bytes):
                (self.folder / f"{label.replace(' ', '-')}-{member}-{time.monotonic_ns()}").write_bytes(reply)
            yield member, reply


def keys_of(config):
    """The server's key and the roster, under secure aggregation."""
    if not config["keys"]:
        return {}
    keys = Path(config["keys"])
    return {"secure_aggregation": Roster.read(keys / "roster"), "identity": Identity.load(keys / "server.key")}


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def record(server, config, out):
    """Train with metrics, from the last checkpoint on; the server may kill itself."""

    def end(record):
        if record["round"] == config["kill-at"]:
            (out / f"killed-{record['round']}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    how = {"rounds": config["rounds"], "evaluate_every": config["evaluate-every"], "on_round": end}
    server.fit(test=parts()[3], folder=out, resume=True, **how)
    (out / "done.json").write_text(json.dumps({"to": server.round}))


def serve(make_server, config):
    """Train from the last checkpoint on; `make_server` takes what every `RemoteServer` takes after its connection."""
    out = Path(config["out"])
    server = make_server(
        make_model(config),
        parts()[0][0][:2],
        defence_of(config),
        adam,
        loss="squared_error",
        batch_size=32,
        wait_for=config["wait-for"],
        min_answers=config["min-answers"],
        timeout=config["timeout"],
        patience=config["patience"],
        attempts=config["attempts"],
        pause=0.5,
        privacy=Privacy(**tomllib.loads(config["privacy"])) if config["privacy"] else None,
        **keys_of(config),
    )
    if config["tap"]:
        server.engine.transport = Tapped(server.engine.transport, Path(config["tap"]))
    if config["evaluate-every"]:
        record(server, config, out)
        return
    if (out / "checkpoint.pt").exists():
        server.resume(out)
    started = server.round

    def log(record):
        with (out / "records.jsonl").open("a") as file:
            file.write(json.dumps(record.to_dict()) + "\n")
        print(record.to_dict(), flush=True)

    server.fit(rounds=config["rounds"], folder=out, checkpoint_every=1, on_round=log)
    save_file(server.model.state_dict(), out / "model.safetensors")
    (out / "done.json").write_text(json.dumps({"from": started, "to": server.round}))
