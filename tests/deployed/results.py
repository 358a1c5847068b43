"""What a run of the test app wrote, and what it should have: who answered in each round, and the model."""

import json
import re

from safetensors.torch import load_file
from tests.deployed.serving import adam
from tests.deployed.task import make_model, parts
from tests.engines import Loopback, LoopbackServer, member
from tests.oracle import worst

from fedveil.defences import Plain, Veil
from fedveil.federation import Federation

MLP = {"net": "mlp"}
NAMES = {150: (0, 1, 2), 110: (0, 2), 90: (1, 2), 100: (0, 1), 60: (0,), 40: (1,), 50: (2,)}


def records(out):
    """One record per round."""
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def answered(out):
    """Who answered in each round, from the number of records; 60, 40 and 50 tell."""
    return [NAMES[record["records"]] for record in records(out)]


def kinds(out):
    """The faults of each round, without the members' names."""
    return [[re.sub(r"client [^:]*: ([^:]*):.*", r"\1", text) for text in r.get("faults", [])] for r in records(out)]


def one_process(defence, rounds):
    """The model of a federation of the first three clients in one process."""
    defence = Plain() if defence == "plain" else Veil(groups=3, additive=100.0)
    options = {"loss": "squared_error", "batch_size": 32, "whole_shard": True}
    run = Federation(make_model(MLP), parts()[:3], defence, adam, **options)
    run.fit(rounds=rounds)
    return run.model.state_dict()


def expected(rounds, **options):
    """The plain model when these clients answered, a tuple per round."""
    data, options = parts(), {"loss": "squared_error", "batch_size": 32, **options}
    members = {k: member(lambda: make_model(MLP), own, k) for k, own in enumerate(data)}
    engine = Loopback(members)
    server = LoopbackServer(engine, make_model(MLP), data[0][0][:2], Plain(), adam, **options)
    for number, present in enumerate(rounds, 1):
        engine.down = set(members) - set(present)
        server.fit(rounds=number)
    return server.model.state_dict()


def error(out):
    """The largest error of the run's model against plain training with the clients that answered."""
    return worst(load_file(out / "model.safetensors"), expected(answered(out)))
