"""FLARE with real processes: the simulator, mTLS, what an eavesdropper hears, and the commands of docs/nvflare.md."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from safetensors.torch import load_file
from tests.deployed.eavesdropping import Ear, listen
from tests.deployed.results import error, one_process, records
from tests.flower.processes import BIN, ROOT, commands, free_port, naming, wait_until
from tests.nvflare.processes import Flare
from tests.oracle import worst


@pytest.mark.slow
def test_veiled_rounds_in_the_simulator_are_plain_ones_of_one_process(tmp_path):
    out = tmp_path / "out"
    with Flare(tmp_path, sites=2, simulator=True) as flare:
        flare.run(out, rounds=5, wait_for=2)
    assert error(out) < 1e-6
    found = records(out)
    assert [(r["answers"], r["records"]) for r in found] == [(2, 100)] * 5
    assert all(r["seconds_work"] <= r["seconds_waiting"] and r["bytes_total"] > 0 for r in found)


@pytest.mark.slow
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_fifty_rounds_over_mtls_give_the_model_of_one_process(defence, tmp_path):
    with Flare(tmp_path) as flare:
        flare.run(tmp_path / "out", rounds=50, defence=defence)
    assert worst(load_file(tmp_path / "out" / "model.safetensors"), one_process(defence, 50)) < 1e-6


@pytest.mark.slow
def test_nothing_that_sites_receive_holds_a_secret_or_predicts(tmp_path):
    ears = []

    def ear(port):
        ears.append(Ear(port))
        return ears[-1].port

    try:
        with Flare(tmp_path / "flare", proxies=[ear] * 3) as flare:
            listen(flare.run, tmp_path, ears)
    finally:
        [one.close() for one in ears]


@pytest.mark.slow
def test_what_a_client_raises_does_not_reach_the_server(tmp_path):
    with Flare(tmp_path) as flare:
        flare.run(tmp_path / "out", rounds=3, faults="1:1:raise")
    faults = [fault for record in records(tmp_path / "out") for fault in record.get("faults", [])]
    assert faults == ["client site-2: raised: RuntimeError on the site; the traceback is in its stderr"]
    assert "this client fails" in (tmp_path / "site-2.log").read_text()
    for file in [tmp_path / "localhost.log", *(tmp_path / "kits/lab/prod_00/localhost").rglob("*")]:
        assert not file.is_file() or b"this client fails" not in file.read_bytes(), file


@pytest.mark.slow
def test_a_site_that_forbids_code_runs_installed_classes_only(tmp_path):
    with Flare(tmp_path, started=()) as flare:
        for part in range(3):
            rights = flare.kits / f"site-{part + 1}" / "local" / "authorization.json"
            found = json.loads(rights.with_suffix(".json.default").read_text())
            found["permissions"]["lead"]["byoc"] = "none"
            rights.write_text(json.dumps(found))
            flare.start_client(part)
        flare.run(tmp_path / "out", rounds=2)
    assert error(tmp_path / "out") < 1e-6


@pytest.mark.slow
def test_the_pages_commands_train_over_mtls(tmp_path):
    install, *steps = commands("nvflare.md")
    assert "pip install" in install
    example = tmp_path / "examples" / "nvflare_app"
    shutil.copytree(ROOT / "examples" / "nvflare_app", example)
    project = example / "project.yml"
    project.write_text(project.read_text().replace("8002", str(free_port())))
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": f"{BIN}:{os.environ['PATH']}"}

    def run(step):
        done = subprocess.run(
            ["bash", "-ec", step], cwd=tmp_path, env={**os.environ, **quiet}, check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    try:
        *before, submitting, last = steps
        for step in before:
            run(step)
        printed = run(submitting)
        job = re.search(r"job (\S+) was submitted", printed)[1]
        status = run(f"fedveil status {job} --kit runs/kits/bank/prod_00/admin@lab.org --user admin@lab.org")
        run(last)
        wait_until(lambda: not naming(f"{tmp_path}/runs/kits"), 60, "the end that the last step asks for")
    finally:
        for pid in naming(f"{tmp_path}/runs"):
            os.kill(pid, signal.SIGKILL)
    assert status == "FINISHED:COMPLETED\n"
    assert re.search(r"job \S+: RUNNING, round \d+/200, accuracy .*2 of 2 answered", printed)
    for name, rounds in (("sim", 50), ("first", 200)):
        found = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["answers"] for record in found] == [2] * rounds
        assert found[-1]["accuracy"] > 0.9
        assert (tmp_path / "runs" / name / "report.html").exists()
