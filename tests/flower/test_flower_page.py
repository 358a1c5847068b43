"""docs/flower.md, followed as it stands: its commands lead to a TLS federation of three processes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.flower.processes import BIN, free_port, mentions, wait_until

ROOT = Path(__file__).parents[2]


def commands():
    """The page's shell blocks, step by step."""
    page = (ROOT / "docs" / "flower.md").read_text()
    section = page.split("## From nothing")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def nodes_that_stay():
    """Step 5 with the command that the page has for nodes that stay."""
    page = (ROOT / "docs" / "flower.md").read_text()
    (first,) = re.findall(r"```sh\n(.*?)\n```", page.split("## Nodes that stay")[1].split("\n## ")[0], re.DOTALL)
    second = first.replace("node0", "node1").replace("partition-id=0", "partition-id=1")
    register = [f"flwr supernode register runs/keys/node{k}.pub lab" for k in range(2)]
    return "\n".join([*register, *(f"{text} > runs/node{k}.log 2>&1 &" for k, text in enumerate((first, second)))])


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["stock", "staying"])
def test_the_pages_commands_train_over_tls(nodes, tmp_path):
    install, *steps = commands()[:6]
    assert "flower-supernode" in steps[3]
    if nodes == "staying":
        steps[3] = nodes_that_stay()
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
        home = f"FLWR_HOME={tmp_path}/runs/flwr"
        for file in Path("/proc").glob("[0-9]*/environ"):
            if mentions(file, home) and file.parent.name != str(os.getpid()):
                os.kill(int(file.parent.name), signal.SIGKILL)
        wait_until(lambda: not any(mentions(f, home) for f in Path("/proc").glob("[0-9]*/environ")), 20, "their end")
    found = [json.loads(line) for line in (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [record["answers"] for record in found] == [2] * 10
    assert found[-1]["accuracy"] > found[0]["accuracy"]
    assert (tmp_path / "runs" / "first" / "report.html").exists()
