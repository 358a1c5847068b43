"""Parts of a long computation: side by side, kept, gone on with, failed on their own."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedveil.errors import BadArgument
from fedveil.studies.jobs import Cell, run_cells


def square(tell, number, log):
    tell(0.5, "half")
    with Path(log).open("a") as lines:
        lines.write(f"{number}\n")
    return {"square": number * number, "process": os.getpid()}


def refuse(tell, number, log):
    raise BadArgument("here", f"no {number}", "another")


def crash(tell, number, log):
    raise ZeroDivisionError("by hand")


def die(tell, number, log):
    os._exit(3)


def cells(log, functions):
    return [Cell(f"cell{n}", function, {"number": n, "log": str(log)}) for n, function in enumerate(functions, start=2)]


def test_results_come_by_name_and_a_second_run_computes_nothing(tmp_path):
    asked = cells(tmp_path / "log", [square, square, square])
    told = []
    first = run_cells(asked, tmp_path / "kept", workers=1, show=lambda *news: told.append(news))
    again = run_cells(asked, tmp_path / "kept", workers=1)
    assert [result["square"] for result in first.values()] == [4, 9, 16]
    assert again == first
    assert (tmp_path / "log").read_text().split() == ["2", "3", "4"]
    assert ("cell3", 0.5, "half") in told


def test_other_arguments_or_a_torn_file_are_computed_again(tmp_path):
    run_cells(cells(tmp_path / "log", [square]), tmp_path, workers=1)
    other = [Cell("cell2", square, {"number": 5, "log": str(tmp_path / "log")})]
    assert run_cells(other, tmp_path, workers=1)["cell2"]["square"] == 25
    (tmp_path / "cell2.json").write_text('{"asked": ')
    assert run_cells(other, tmp_path, workers=1)["cell2"]["square"] == 25
    assert (tmp_path / "log").read_text().split() == ["2", "5", "5"]


def test_a_cell_that_fails_is_a_failed_cell_and_is_tried_again_next_time(tmp_path, capsys):
    asked = cells(tmp_path / "log", [square, refuse, crash])
    found = run_cells(asked, tmp_path, workers=1)
    assert found["cell2"]["square"] == 4
    assert found["cell3"]["failed"] == "here: no 3.\n  Fix: another"
    assert found["cell4"]["failed"] == "ZeroDivisionError: by hand"
    assert "ZeroDivisionError" in capsys.readouterr().err
    mended = [asked[0], Cell("cell3", square, asked[1].arguments)]
    assert run_cells(mended, tmp_path, workers=1)["cell3"]["square"] == 9


def test_processes_work_side_by_side_and_a_dead_one_is_told(tmp_path):
    told = []
    found = run_cells(
        cells(tmp_path / "log", [square, square]), tmp_path, workers=2, show=lambda *news: told.append(news)
    )
    assert [result["square"] for result in found.values()] == [4, 9]
    assert os.getpid() not in {result["process"] for result in found.values()}
    assert {name for name, share, what in told if what == "half"} == {"cell2", "cell3"}
    dead = run_cells(cells(tmp_path / "log", [die, die]), tmp_path / "dead", workers=2)
    assert all("its process died" in result["failed"] for result in dead.values())


LONG = """
import sys, time
from pathlib import Path
from fedveil.studies.jobs import Cell, run_cells
from test_cells import square, wait

if __name__ == "__main__":
    log, folder, workers = sys.argv[1:]
    cells = [Cell("quick", square, {"number": 2, "log": log}), Cell("long", wait, {"number": 3, "log": log})]
    run_cells(cells, Path(folder), workers=int(workers))
"""


def wait(tell, number, log):
    if Path(log).with_name("go on").exists():
        return square(tell, number, log)
    half = Path(log).with_name("half")
    half.write_text(str(os.getpid()))
    half.rename(half.with_name("waits"))
    time.sleep(600)


def killed_while_it_waits(tmp_path, workers):
    """Start a computation, and kill it when its first cell is done and the second one waits; returns its children."""
    script = tmp_path / "long.py"
    script.write_text(LONG)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, script, tmp_path / "log", tmp_path / "kept", str(workers)]
    run = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths})
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "kept" / "quick.json").exists() or (workers > 1 and not (tmp_path / "waits").exists()):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = children_of(run.pid)
    finally:
        run.kill()
        run.wait()
    return children


def children_of(process):
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = file.read_text().rpartition(")")[2].split()[1]
            found += [int(file.parent.name)] if int(parent) == process else []
    return found


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find children")
def test_workers_end_with_the_process_that_asked_for_them(tmp_path):
    started = killed_while_it_waits(tmp_path, workers=2)
    assert int((tmp_path / "waits").read_text()) in started
    assert len(started) >= 3  # two workers, and one that passes news on
    deadline = time.monotonic() + 60
    while any(map(alive, started)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_computation_that_is_killed_goes_on_with_what_was_done(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "kept"
    killed_while_it_waits(tmp_path, workers=1)
    (tmp_path / "go on").touch()
    asked = {"log": str(log)}
    cells = [Cell("quick", square, {"number": 2, **asked}), Cell("long", wait, {"number": 3, **asked})]
    kept = run_cells(cells, folder, workers=1)
    assert [result["square"] for result in kept.values()] == [4, 9]
    assert log.read_text().split() == ["2", "3"]  # the first was not computed again
