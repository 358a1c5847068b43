"""The tutorial's code runs: its first steps in this process, its deployment as processes with real keys."""

import json
import os
import re
import signal
import subprocess

import pytest
from tests.docs.markdown import ROOT, steps
from tests.docs.running import file_of, reader, run_block
from tests.flower.processes import BIN, free_port, wait_until

PAGE = ROOT / "docs" / "tutorial.md"


def pieces():
    """Split the blocks into those before the deployment and the rest."""
    every = list(steps(PAGE))
    first = next(number for number, (_, kind, code) in enumerate(every) if "export CHURN_DATA" in code)
    return every[:first], every[first:]


def followed(folder, capsys, shorter=lambda code: code):
    """Run steps 1 to 7 without the audit and return the printed accuracies."""
    names = {"__name__": "page"}
    with reader(folder):
        for line, kind, code in pieces()[0]:
            run_block(f"tutorial:{line}", kind, shorter(code), names, ("pip install", "fedveil audit"))
    printed, notes = capsys.readouterr()
    assert "100.0% scaled or with additive noise" in printed
    for line in re.findall(r"^customers: .*$", PAGE.read_text(), re.MULTILINE):
        assert line in notes
    return [float(value) for value in re.findall(r"(?<!best )(?<!balanced )accuracy +(\d\.\d+)", printed)]


def test_a_hasty_reader_gets_the_same_from_plain_and_veil(tmp_path, capsys):
    """Every step, with fewer epochs."""

    def shorter(code):
        for long, short in (("epochs = 30", "epochs = 1"), ("--epochs 40", "--epochs 2"), ("epochs=20", "epochs=1")):
            code = code.replace(long, short)
        return code

    plain, veil, _, own_plain, own_veil, summed = followed(tmp_path, capsys, shorter)
    assert plain == pytest.approx(veil, abs=0.01)
    assert own_plain == pytest.approx(own_veil, abs=0.01)
    assert own_plain == pytest.approx(summed, abs=0.01)


@pytest.mark.slow
def test_a_reader_gets_the_accuracy_that_the_tutorial_names(tmp_path, capsys):
    found = followed(tmp_path, capsys)
    assert len(found) == 6
    assert all(0.88 < accuracy < 0.96 for accuracy in found)


@pytest.mark.slow
def test_the_deployment_trains_over_mtls_and_then_with_secure_aggregation(tmp_path):
    pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")
    from tests.nvflare.processes import naming

    before, after = pieces()
    names = {"__name__": "page"}
    with reader(tmp_path):
        for line, kind, code in before:
            run_block(
                f"tutorial:{line}", kind, code, names, ("pip install", "fedveil audit", "fedveil train", "load_model")
            )
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "CHURN_DATA": str(tmp_path / "sites"),
        }
        try:
            for line, kind, code in after:
                if file_of(code) or kind != "sh":
                    run_block(f"tutorial:{line}", kind, code.replace("8002", str(free_port())), names)
                    continue
                done = subprocess.run(
                    ["bash", "-ec", code], cwd=tmp_path, env=environment, check=False,
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
                )  # fmt: skip
                assert done.returncode == 0, f"line {line}\n" + done.stdout[-3000:] + done.stderr[-3000:]
            wait_until(lambda: not naming(f"{tmp_path}/runs/kits"), 60, "the end that the last step asks for")
        finally:
            for pid in naming(f"{tmp_path}/runs"):
                os.kill(pid, signal.SIGKILL)
    for name, sites in (("simulated", 2), ("deployed", 2), ("secure", 4)):
        found = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["answers"] for record in found] == [sites] * 100
        assert found[-1]["accuracy"] > 0.85
        assert (tmp_path / "runs" / name / "report.html").exists()
    assert all("fixed_point_error" in record for record in found)  # of the last, the secure one


@pytest.mark.slow
def test_the_audit_says_what_the_tutorial_says(tmp_path, capsys):
    with reader(tmp_path):
        names = {"__name__": "page"}
        for line, kind, code in pieces()[0]:
            if file_of(code) or any(word in code for word in ("make_table", "--out runs/veil\n", "fedveil audit")):
                run_block(f"tutorial:{line}", kind, code, names)
    printed = capsys.readouterr().out
    for row in ("as published", "offset removed", "two broadcasts, no data", "own labels"):
        assert row in printed
