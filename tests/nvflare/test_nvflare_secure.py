"""Secure aggregation over FLARE with mTLS: four clients in processes of their own, one killed and back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from safetensors.torch import load_file
from tests.deployed.results import expected, records
from tests.deployed.task import SIZES
from tests.flower.processes import wait_until
from tests.nvflare.processes import ADMIN, BIN, Flare
from tests.oracle import worst

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


def test_twenty_rounds_with_one_client_killed_and_back(tmp_path):
    make_keys(tmp_path / "keys")
    out, tap = tmp_path / "out", tmp_path / "tap"
    tap.mkdir()
    (tmp_path / "marks").mkdir()
    with Flare(tmp_path / "flare", sites=4) as flare:
        config = {"keys": str(tmp_path / "keys"), "tap": str(tap), "marks": str(tmp_path / "marks")}
        job = flare.run(out, rounds=ROUNDS, wait_for=4, work=0.3, timeout=10.0, wait=False, **config)
        wait_until((tmp_path / "marks" / "1-5").exists, 200, "client 1 in round 5")
        flare.kill_work(1)
        flare.wait(out, 300)
        assert job.wait(120) == 0
    found = records(out)
    assert len(found) == ROUNDS
    survivors = [SURVIVORS[record["records"]] for record in found]
    assert survivors[-1] == (0, 1, 2, 3)
    assert all(record["answers"] == len(who) for record, who in zip(found, survivors, strict=True))
    assert worst(load_file(out / "model.safetensors"), expected(survivors, limits=None)) < 1e-6
    assert {read_kind(file.read_bytes()) for file in tap.iterdir()} == {"maskedanswer", "step"}


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
