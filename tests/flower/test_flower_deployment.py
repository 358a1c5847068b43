"""One short deployment of real processes: a SuperLink and two SuperNodes, two rounds; and long ones."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from safetensors.torch import load_file
from tests.deployed.results import records
from tests.deployed.task import make_model, parts
from tests.flower.processes import Deployment
from tests.oracle import worst

from fedveil.defences import Plain, Veil
from fedveil.federation import Federation


def engine(defence, rounds, clients=3):
    run = Federation(
        make_model({"net": "mlp"}),
        parts()[:clients],
        defence,
        lambda p: torch.optim.Adam(p, 1e-2),
        loss="squared_error",
        batch_size=32,
        whole_shard=True,
    )
    run.fit(rounds=rounds)
    return run.model.state_dict()


@pytest.mark.slow
def test_two_veiled_rounds_of_two_supernodes_are_plain_ones_of_the_engine(tmp_path):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(2):
            deployment.start_node(part)
        deployment.run(out, rounds=2, wait_for=2, defence="veil", within=600)
    assert worst(load_file(out / "model.safetensors"), engine(Plain(), 2, clients=2)) < 1e-6
    assert [(r["answers"], r["records"]) for r in records(out)] == [(2, 100), (2, 100)]


@pytest.mark.slow
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_simulation_and_deployment_give_the_engines_model_after_twenty_rounds(defence, tmp_path):
    expected = engine(Plain() if defence == "plain" else Veil(groups=3, additive=100.0), 20)
    for name in ("simulation", "deployment"):
        out = tmp_path / name
        with Deployment(tmp_path / f"flwr-{name}", simulation=name == "simulation") as deployment:
            if name == "deployment":
                for part in range(3):
                    deployment.start_node(part)
            deployment.run(out, rounds=20, defence=defence, within=900)
        assert [record["answers"] for record in records(out)] == [3] * 20
        assert worst(load_file(out / "model.safetensors"), expected) < 1e-6
