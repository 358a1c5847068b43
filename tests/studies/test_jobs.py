"""Parts of a long computation: in parallel, stored, resumed, handed on, failed separately."""

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
from fedveil.studies.jobs import Failure, Result, StudyJob, run_jobs


@dataclass(frozen=True)
class Number(Result):
    value: int
    process: int


@dataclass(frozen=True)
class Square:
    number: int
    log: str
    fate: str = ""

    def __call__(self, progress, done):
        if self.fate == "refuse":
            raise BadArgument("here", f"no {self.number}", "another")
        if self.fate == "crash":
            raise ZeroDivisionError("by hand")
        if self.fate == "die":
            os._exit(3)
        progress(0.5, "half")
        with Path(self.log).open("a") as lines:
            lines.write(f"{self.number}\n")
        return Number(self.number**2, os.getpid())


@dataclass(frozen=True)
class Add:
    jobs: tuple[StudyJob, ...]

    def __call__(self, progress, done):
        return Number(sum(done.require(job).value for job in self.jobs), os.getpid())


def jobs(log, *fates):
    return [StudyJob(f"job{n}", Square(n, str(log), fate), Number) for n, fate in enumerate(fates, start=2)]


def values(asked, done):
    return [done.require(job).value for job in asked]


def test_a_result_is_computed_once_unless_the_work_changes_or_its_file_is_torn(tmp_path):
    log, news = tmp_path / "log", []
    asked = jobs(log, "", "")
    first = run_jobs(asked, tmp_path / "jobs", workers=1, show=lambda *one: news.append(one))
    again = run_jobs(asked, tmp_path / "jobs", workers=1)
    assert values(asked, first) == values(asked, again) == [4, 9]
    assert all(isinstance(again[job], Number) for job in asked)
    assert ("job3", 0.5, "half") in news
    other = [StudyJob("job2", Square(5, str(log)), Number)]
    assert values(other, run_jobs(other, tmp_path / "jobs", workers=1)) == [25]
    for torn in ('{"asked": ', "[]", json.dumps({"asked": repr(other[0].task), "result": {"value": "many"}})):
        (tmp_path / "jobs" / "job2.json").write_text(torn)
        assert values(other, run_jobs(other, tmp_path / "jobs", workers=1)) == [25]
    assert log.read_text().split() == ["2", "3", "5", "5", "5", "5"]


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_hand_results_on_fail_with_those_that_they_need_and_run_again(tmp_path, workers, monkeypatch, capfd):
    log = str(tmp_path / "log")
    for module in ("multiprocessing", "random", "socket"):  # a process must not take them from the working directory
        (tmp_path / f"{module}.py").write_text("raise SystemExit(__name__)")
    monkeypatch.chdir(tmp_path)
    first, second, broken, crashed = jobs(log, "", "", "refuse", "crash")
    total = StudyJob("total", Add((first, second)), Number, (first, second))
    blocked = StudyJob("blocked", Add((first, broken)), Number, (first, broken))
    late = StudyJob("late", Square(7, log), Number, predecessors=(broken,))
    every = [first, second, broken, crashed, total, blocked, late]
    found = run_jobs(every, tmp_path / "jobs", workers=workers)
    assert found.require(total).value == 13
    assert found[blocked] == Failure("job4: here: no 4.\n  Fix: another")
    assert found.require(late).value == 49  # it only waits
    with pytest.raises(FedveilError, match="no 4"):
        found.require(blocked)
    assert found[crashed] == Failure("ZeroDivisionError: by hand")
    assert "ZeroDivisionError" in capfd.readouterr().err
    mended = [first, StudyJob(broken.name, Square(4, log), Number)]
    assert values(mended, run_jobs(mended, tmp_path / "jobs", workers=1)) == [4, 16]


@pytest.mark.slow
def test_processes_run_in_parallel_and_a_dead_one_is_reported(tmp_path):
    news, asked = [], jobs(tmp_path / "log", "", "")
    found = run_jobs(asked, tmp_path, workers=2, show=lambda *one: news.append(one))
    assert values(asked, found) == [4, 9]
    assert os.getpid() not in {found.require(job).process for job in asked}
    assert {name for name, _, what in news if what == "half"} == {"job2", "job3"}
    asked = jobs(tmp_path / "log", "die", "die")
    dead = run_jobs(asked, tmp_path / "dead", workers=2)
    assert all("the worker process died" in dead[job].failed for job in asked)


LONG = """
import sys
from pathlib import Path
from fedveil.studies.jobs import StudyJob, run_jobs
from tests.studies.test_jobs import Number, Square, Wait

if __name__ == "__main__":
    log, folder, workers = sys.argv[1:]
    jobs = [StudyJob("quick", Square(2, log), Number), StudyJob("long", Wait(3, log), Number)]
    run_jobs(jobs, Path(folder), workers=int(workers))
"""


class Wait(Square):
    def __call__(self, progress, done):
        if Path(self.log).with_name("continue").exists():
            return super().__call__(progress, done)
        half = Path(self.log).with_name("half")
        half.write_text(str(os.getpid()))
        half.rename(half.with_name("waits"))
        time.sleep(600)


def kill_while_it_waits(tmp_path, workers):
    """Start a computation, and kill it when its first job is done and the second one waits; returns its children."""
    script = tmp_path / "long.py"
    script.write_text(LONG)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, script, tmp_path / "log", tmp_path / "jobs", str(workers)]
    run = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths})
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "jobs" / "quick.json").exists() or not (tmp_path / "waits").exists():
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = file.read_text().rpartition(")")[2].split()[1]
                children += [int(file.parent.name)] if int(parent) == run.pid else []
    finally:
        run.kill()
        run.wait()
    return children


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find children")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    started = kill_while_it_waits(tmp_path, workers=2)
    assert int((tmp_path / "waits").read_text()) in started
    assert len(started) >= 3  # two workers, and the tracker of their semaphores
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_computation_that_was_killed_resumes_with_the_results_that_are_there(tmp_path):
    log = tmp_path / "log"
    kill_while_it_waits(tmp_path, workers=1)
    (tmp_path / "continue").touch()
    asked = [StudyJob("quick", Square(2, str(log)), Number), StudyJob("long", Wait(3, str(log)), Number)]
    assert values(asked, run_jobs(asked, tmp_path / "jobs", workers=1)) == [4, 9]
    assert log.read_text().split() == ["2", "3"]  # the first was not computed again
