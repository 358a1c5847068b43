"""Parts of a long computation: side by side, kept, continued, handed on, failed on their own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedveil.errors import BadArgument, FedveilError
from fedveil.studies.jobs import Failed, Job, Result, run_jobs


@dataclass(frozen=True)
class Squared(Result):
    square: int
    process: int


@dataclass(frozen=True)
class Square:
    number: int
    log: str

    def __call__(self, progress, done):
        progress(0.5, "half")
        with Path(self.log).open("a") as lines:
            lines.write(f"{self.number}\n")
        return Squared(self.number**2, os.getpid())


@dataclass(frozen=True)
class Refuse(Square):
    def __call__(self, progress, done):
        raise BadArgument("here", f"no {self.number}", "another")


@dataclass(frozen=True)
class Crash(Square):
    def __call__(self, progress, done):
        raise ZeroDivisionError("by hand")


@dataclass(frozen=True)
class Die(Square):
    def __call__(self, progress, done):
        os._exit(3)


@dataclass(frozen=True)
class Add(Square):
    first: Job
    second: Job

    def __call__(self, progress, done):
        return Squared(done.require(self.first).square + done.require(self.second).square, os.getpid())


def jobs(log, kinds):
    return [Job(f"job{n}", kind(n, str(log)), Squared) for n, kind in enumerate(kinds, start=2)]


def squares(asked, done):
    return [done.require(job).square for job in asked]


def test_results_have_their_types_and_a_second_run_computes_nothing(tmp_path):
    asked = jobs(tmp_path / "log", [Square, Square, Square])
    told = []
    first = run_jobs(asked, tmp_path / "kept", workers=1, show=lambda *news: told.append(news))
    again = run_jobs(asked, tmp_path / "kept", workers=1)
    assert squares(asked, first) == squares(asked, again) == [4, 9, 16]
    assert all(isinstance(again[job], Squared) for job in asked)
    assert (tmp_path / "log").read_text().split() == ["2", "3", "4"]
    assert ("job3", 0.5, "half") in told


def test_other_work_or_a_torn_file_is_computed_again(tmp_path):
    run_jobs(jobs(tmp_path / "log", [Square]), tmp_path, workers=1)
    other = [Job("job2", Square(5, str(tmp_path / "log")), Squared)]
    assert squares(other, run_jobs(other, tmp_path, workers=1)) == [25]
    for torn in ('{"asked": ', "[]", json.dumps({"asked": repr(other[0].work), "result": {"square": "many"}})):
        (tmp_path / "job2.json").write_text(torn)
        assert squares(other, run_jobs(other, tmp_path, workers=1)) == [25]
    assert (tmp_path / "log").read_text().split() == ["2", "5", "5", "5", "5"]


def test_a_job_that_fails_is_a_failed_job_and_is_tried_again_next_time(tmp_path, capsys):
    asked = jobs(tmp_path / "log", [Square, Refuse, Crash])
    found = run_jobs(asked, tmp_path, workers=1)
    assert found.require(asked[0]).square == 4
    assert found[asked[1]] == Failed("here: no 3.\n  Fix: another")
    assert found[asked[2]] == Failed("ZeroDivisionError: by hand")
    assert "ZeroDivisionError" in capsys.readouterr().err
    mended = [asked[0], Job("job3", Square(3, str(tmp_path / "log")), Squared)]
    assert squares(mended, run_jobs(mended, tmp_path, workers=1)) == [4, 9]


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_hand_values_on_and_fail_with_what_they_need(tmp_path, workers, monkeypatch):
    log = str(tmp_path / "log")
    for module in ("multiprocessing", "random", "socket"):  # a process must not take them from the working directory
        (tmp_path / f"{module}.py").write_text("raise SystemExit(__name__)")
    monkeypatch.chdir(tmp_path)
    first, second, broken = jobs(log, [Square, Square, Refuse])
    total = Job("total", Add(0, log, first, second), Squared, (first, second))
    blocked = Job("blocked", Add(0, log, first, broken), Squared, (first, broken))
    late = Job("late", Square(7, log), Squared, after=(broken,))
    found = run_jobs([first, second, broken, total, blocked, late], tmp_path / "kept", workers=workers)
    assert found.require(total).square == 13
    assert found[blocked] == Failed("job4: here: no 4.\n  Fix: another")
    assert found.require(late).square == 49  # it only waits
    with pytest.raises(FedveilError, match="no 4"):
        found.require(blocked)


def test_processes_work_side_by_side_and_a_dead_one_is_told(tmp_path):
    told, asked = [], jobs(tmp_path / "log", [Square, Square])
    found = run_jobs(asked, tmp_path, workers=2, show=lambda *news: told.append(news))
    assert squares(asked, found) == [4, 9]
    assert os.getpid() not in {found.require(job).process for job in asked}
    assert {name for name, share, what in told if what == "half"} == {"job2", "job3"}
    asked = jobs(tmp_path / "log", [Die, Die])
    dead = run_jobs(asked, tmp_path / "dead", workers=2)
    assert all("its process died" in dead[job].failed for job in asked)


LONG = """
import sys, time
from pathlib import Path
from fedveil.studies.jobs import Job, run_jobs
from test_jobs import Square, Squared, Wait

if __name__ == "__main__":
    log, folder, workers = sys.argv[1:]
    jobs = [Job("quick", Square(2, log), Squared), Job("long", Wait(3, log), Squared)]
    run_jobs(jobs, Path(folder), workers=int(workers))
"""


@dataclass(frozen=True)
class Wait(Square):
    def __call__(self, progress, done):
        if Path(self.log).with_name("go on").exists():
            return super().__call__(progress, done)
        half = Path(self.log).with_name("half")
        half.write_text(str(os.getpid()))
        half.rename(half.with_name("waits"))
        time.sleep(600)


def killed_while_it_waits(tmp_path, workers):
    """Start a computation, and kill it when its first job is done and the second one waits; returns its children."""
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
    asked = [Job("quick", Square(2, str(log)), Squared), Job("long", Wait(3, str(log)), Squared)]
    assert squares(asked, run_jobs(asked, folder, workers=1)) == [4, 9]
    assert log.read_text().split() == ["2", "3"]  # the first was not computed again
