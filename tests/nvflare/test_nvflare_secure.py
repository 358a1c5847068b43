"""Secure aggregation over FLARE with mTLS: four clients in processes of their own, one killed and back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

import torch
from safetensors.torch import load_file
from tests.deployed.results import expected, records
from tests.deployed.serving import adam
from tests.deployed.task import SIZES, make_model, parts
from tests.flower.processes import wait_until
from tests.nvflare.processes import ADMIN, BIN, Flare
from tests.oracle import worst

from fedveil import Federation, Privacy, Veil
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.secagg import Policy
from fedveil.wire import read_kind

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare_app" / "job.py"
ROUNDS = 20
SURVIVORS = {sum(SIZES): (0, 1, 2, 3)} | {sum(SIZES) - SIZES[k]: tuple({0, 1, 2, 3} - {k}) for k in range(4)}


def make_keys(folder):
    """As docs/secure-aggregation.md does it."""
    folder.mkdir()
    server, *lines = [keys("new", name, "--out", folder) for name in ("server", *[f"site-{k + 1}" for k in range(4)])]
    (folder / "roster").write_text("".join(lines))
    for part in range(4):
        keys("policy", folder / f"site-{part + 1}.key", "--server", server.strip())
        policy = folder / f"site-{part + 1}.policy"
        policy.write_text(policy.read_text().replace("min_records = 32", "min_records = 20"))


def keys(*words):
    command = [str(word) for word in (BIN / "fedveil", "keys", *words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_with_a_kill(folder, **config):
    """Train for twenty rounds, and kill the second site's process in round 5; return the records and the folder."""
    out, tap, marks = folder / "out", folder / "tap", folder / "marks"
    tap.mkdir()
    marks.mkdir()
    with Flare(folder / "flare", sites=4) as flare:
        config |= {"keys": str(folder / "keys"), "tap": str(tap), "marks": str(marks)}
        job = flare.run(out, rounds=ROUNDS, wait_for=4, work=0.3, timeout=30.0, wait=False, **config)
        wait_until(lambda: (marks / "1-5").exists() or job.poll() is not None, 400, "client 1 in round 5")
        assert job.poll() is None, flare.logs()
        flare.kill_work(1)
        flare.wait(out, 600)
        assert job.wait(120) == 0
    found = records(out)
    assert len(found) == ROUNDS
    assert {read_kind(file.read_bytes()) for file in tap.iterdir()} == {"maskedanswer", "step"}
    return found, out


def test_twenty_rounds_with_one_client_killed_and_back(tmp_path):
    make_keys(tmp_path / "keys")
    found, out = run_with_a_kill(tmp_path)
    survivors = [SURVIVORS[record["records"]] for record in found]
    assert survivors[-1] == (0, 1, 2, 3)
    assert all(record["answers"] == len(who) for record, who in zip(found, survivors, strict=True))
    assert worst(load_file(out / "model.safetensors"), expected(survivors, limits=None)) < 1e-6


PRIVACY = {"noise": 1.0, "rate": 0.5, "clip": 0.5, "noise_by": "clients", "vanishing": 1}
LIMITS = '[privacy]\ndataset = "site-{part}"\nrecords = {records}\nepsilon = 60.0\nnoise = 0.9\nrate = 0.5\n'


def train_in_one_process():
    """The same rounds, without a kill."""
    model = make_model({"net": "mlp"})
    own = Federation(
        model,
        parts(),
        Veil(multiplicative=1.0, decoys=2),
        adam,
        loss="squared_error",
        privacy=Privacy(**PRIVACY),
        secure_aggregation=True,
    )
    own.fit(rounds=ROUNDS)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_veil_secure_aggregation_and_record_privacy_with_one_client_killed_and_back(tmp_path):
    make_keys(tmp_path / "keys")
    for part, size in enumerate(SIZES):
        policy = tmp_path / "keys" / f"site-{part + 1}.policy"
        policy.write_text(policy.read_text() + LIMITS.format(part=part, records=size))  # a ledger each
    privacy = "\n".join(f"{name} = {json.dumps(value)}" for name, value in PRIVACY.items())
    found, out = run_with_a_kill(tmp_path, privacy=privacy)
    counted = [record["records"] for record in found]
    assert set(counted) <= set(SURVIVORS)  # the declared numbers of those in the sum: at most one is missing
    assert counted[-1] == sum(SIZES)
    sums = sum("skipped" not in record for record in found)
    assert found[-1]["epsilon"] == pytest.approx(epsilon(sums, 1.0, 1e-5, 0.5))
    for part in range(4):
        own = Policy.read(tmp_path / "keys" / f"site-{part + 1}.policy").privacy
        spent = PrivacyLedger(own.ledger, own.epsilon, own.delta).spent()
        uploads = len(list((tmp_path / "tap").glob(f"*upload-site-{part + 1}-*")))
        lost = 1 if part == 1 else 0  # the round in which it was killed is counted, though its upload may not have left
        assert uploads <= spent[1.0, 0.5] <= uploads + lost
    others = torch.stack([train_in_one_process() for _ in range(6)])
    tensors = load_file(out / "model.safetensors")
    model = torch.cat([tensors[name].flatten() for name, _ in make_model({"net": "mlp"}).named_parameters()])
    spread = max(float(torch.linalg.vector_norm(own - others.mean(0))) for own in others)
    # distances in thousands of dims vary by a few percent only; a missing share of the noise or none at all shows
    assert 0.5 * spread < float(torch.linalg.vector_norm(model - others.mean(0))) < 2 * spread


def test_the_example_takes_keys_from_each_sites_environment(tmp_path):
    home, out = tmp_path / "keys", tmp_path / "out"
    make_keys(home)
    own = {"FEDVEIL_IDENTITY": str(home / "server.key"), "FEDVEIL_ROSTER": str(home / "roster")}
    with Flare(tmp_path / "flare", sites=4, started=(), server_environment=own) as flare:
        for part in range(4):
            files = {"FEDVEIL_IDENTITY": str(home / f"site-{part + 1}.key"), "FEDVEIL_ROSTER": str(home / "roster")}
            flare.start_client(part, **files)
        words = f"--data digits --sites 4 --rounds 20 --secure-aggregation --out {out}"
        job = flare.start("job", sys.executable, EXAMPLE, *words.split(), "--kit", flare.kits / ADMIN)
        assert job.wait(300) == 0, flare.logs()
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["answers"] for record in found] == [4] * 20
    assert all(0 < record["fixed_point_error"] < 1e-6 for record in found)
    assert found[-1]["accuracy"] > found[0]["accuracy"] + 0.3
