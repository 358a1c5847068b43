"""The example app as it is in the repository: in a grid within this process, and by the commands of docs/flower.md."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from flwr.app import Context, RecordDict
from tests.data.making import bank_row, bank_text
from tests.flower.grid import LocalGrid
from tests.flower.processes import BIN, ROOT, commands, free_port, naming, wait_until

EXAMPLE = ROOT / "examples" / "flower_app"


@pytest.fixture
def apps(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from bank_app import client_app, server_app

    yield client_app.app, server_app.app
    for name in [name for name in sys.modules if name.startswith("bank_app")]:
        del sys.modules[name]


def run(apps, tmp_path, monkeypatch, **changes):
    monkeypatch.setenv("HOME", str(tmp_path))  # where nodes keep their records
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"rounds": 3, "out": str(tmp_path / "out"), "hidden": 8, **changes}
    client, server = apps
    grid = LocalGrid(client, 3, run_config=config)
    server(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    return grid, [json.loads(line) for line in lines]


@pytest.mark.parametrize("defence", ["plain", "veil", "ppdl", "dbcl", "spn"])
def test_the_example_trains_under_every_defence(apps, tmp_path, monkeypatch, defence):
    _, found = run(apps, tmp_path, monkeypatch, data="digits", defence=defence)
    assert [record["answers"] for record in found] == [3] * 3
    names = {"audit.json", "config.json", "metrics.jsonl", "report.html", "status.json", "summary.json", ".lock"}
    names |= {"encoding.json", "model.safetensors", "checkpoint.pt", "checkpoint.previous.pt", "best.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    if defence == "veil":  # the report states what is perturbed
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert sum(summary[kind] for kind in ("scaled", "signed", "moved", "bare")) == pytest.approx(1)
        page = (tmp_path / "out" / "report.html").read_text()
        assert "What the veil perturbs" in page
        assert f"{100 * summary['scaled']:.1f} %" in page


def test_the_example_reads_bank_and_goes_on_from_its_checkpoint(apps, tmp_path, monkeypatch):
    (tmp_path / "bank-additional-full.csv").write_text(bank_text([bank_row(n) for n in range(200)]))
    path = str(tmp_path / "bank-additional-full.csv")
    run(apps, tmp_path, monkeypatch, path=path)
    grid, found = run(apps, tmp_path, monkeypatch, path=path, rounds=5)
    assert len(grid.sent) == 2 * 3
    assert [record["round"] for record in found] == [1, 2, 3, 4, 5]
    assert all("mse" in record for record in found)
    assert len(list((tmp_path / ".cache" / "fedveil" / "flower").glob("bank-*.safetensors"))) == 3


def test_certificates_are_made_once_and_name_their_hosts(tmp_path):
    script, keys = EXAMPLE / "make_certificates.sh", tmp_path / "keys"
    subprocess.run([script, keys, "2", "link.example", "10.0.0.7"], check=True, capture_output=True)
    assert {p.name for p in keys.iterdir()} >= {"ca.crt", "server.crt", "server.key", "node0", "node0.pub", "node1"}
    assert (keys / "server.key").stat().st_mode & 0o077 == 0
    text = subprocess.run(
        ["openssl", "x509", "-in", keys / "server.crt", "-noout", "-text"], check=True, capture_output=True, text=True
    ).stdout
    assert all(name in text for name in ("DNS:localhost", "DNS:link.example", "IP Address:10.0.0.7"))
    check = ["openssl", "verify", "-CAfile", keys / "ca.crt", keys / "server.crt"]
    subprocess.run(check, check=True, capture_output=True)
    again = subprocess.run([script, keys, "2"], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "already holds certificates" in again.stderr


@pytest.mark.slow
def test_the_pages_commands_train_over_tls(tmp_path):
    install, *steps = commands("flower.md")[:6]
    assert "flower-supernode" in steps[3]
    assert "pip install" in install
    exports = [line for line in install.splitlines() if line.startswith("export")]
    script = "\n".join(["set -e", *exports, *steps, "kill $(jobs -p)"])
    script = script.replace(":8000", f":{(port := free_port())}")
    script = script.replace("flower-superlink ", f"flower-superlink --port {port} ")
    script = re.sub(r"909\$k", "$((" + str(free_port()) + " + k))", script)
    for name in ("examples", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs").mkdir()
    path = f"{os.environ.get('PYTHONPATH', '')}:{ROOT / 'src'}"
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=900)
        assert process.returncode == 0, text
    finally:
        home = f"FLWR_HOME={tmp_path}/runs/flwr\0"
        for pid in naming(home, "environ"):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not naming(home, "environ"), 20, "their end")
    found = [json.loads(line) for line in (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [record["answers"] for record in found] == [2] * 10
    assert found[-1]["accuracy"] > found[0]["accuracy"]
    assert (tmp_path / "runs" / "first" / "report.html").exists()
