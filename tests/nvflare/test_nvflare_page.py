"""docs/nvflare.md, followed as it stands: its commands lead to an mTLS federation of three processes."""

import json
import os
import shutil
import signal
import subprocess

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.flower.processes import BIN, ROOT, commands, free_port, wait_until
from tests.nvflare.processes import naming


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
    try:
        for step in steps:
            done = subprocess.run(
                ["bash", "-ec", step], cwd=tmp_path, env={**os.environ, **quiet}, check=False,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        wait_until(lambda: not naming(f"{tmp_path}/runs/kits"), 60, "the end that the last step asks for")
    finally:
        for pid in naming(f"{tmp_path}/runs"):
            os.kill(pid, signal.SIGKILL)
    for name, rounds in (("sim", 50), ("first", 200)):
        found = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["answers"] for record in found] == [2] * rounds
        assert found[-1]["accuracy"] > 0.9
        assert (tmp_path / "runs" / name / "report.html").exists()
