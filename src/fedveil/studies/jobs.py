"""The parts of a long computation: side by side on the cores there are, each kept on disk when it is done.

A computation that was stopped goes on: a job whose result is on disk, for the same work and on the same basis (version,
data, code, checkpoint), is not computed again. A job that fails is a failed job; those that need it fail with it, and
all others go on.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Queue
from typing import Generic, Protocol, TypeVar, cast

import torch
from pydantic import TypeAdapter

from fedveil.errors import FedveilError
from fedveil.files import write_whole
from fedveil.plain_json import read_json, to_json
from fedveil.studies.basis import AGAIN, Basis, explain_change, written_at
from fedveil.studies.digests import Digests

Progress = Callable[[float, str], None]  # the share that is done, and what is being done
Show = Callable[[str, float, str], None]  # the job, and its progress
POLL = 0.2  # seconds


class Result:
    """Base of what jobs return: frozen dataclasses of plain values, which pydantic writes as JSON and reads again."""


@dataclass(frozen=True)
class Failed(Result):
    """In place of a result: why there is none."""

    failed: str


R = TypeVar("R", bound=Result, covariant=True)


class Work(Protocol[R]):
    """What a job does: a frozen dataclass of all that decides its result, which is called in a process of its own."""

    def __call__(self, progress: Progress, done: "Done") -> R:
        """Compute the result; `done` has those of the jobs that this one needs."""


@dataclass(frozen=True)
class Job(Generic[R]):
    """A part of a computation.

    Attributes:
        name: of its file; another one for every job in a folder.
        work: what to do. Its repr says what was asked for; data and code of the configurations in it are compared too.
        result: the type of what it returns.
        needs: jobs that must be done first, and whose results it gets.
        after: jobs that must be over first, whether they failed or not.
        attacked: folder of a run that the work attacks as it is; a new checkpoint there makes a new result.
    """

    name: str
    work: Work[R]
    result: type[R]
    needs: tuple["Job[Result]", ...] = ()
    after: tuple["Job[Result]", ...] = ()
    attacked: Path | None = None


class Done:
    """Results of jobs, each with the type of its job, and the basis of the job that gets them."""

    def __init__(self, results: Mapping[str, Result], basis: Basis | None = None) -> None:
        self._results = dict(results)
        self.basis = basis or Basis()

    def __getitem__(self, job: Job[R]) -> R | Failed:
        return cast("R | Failed", self._results[job.name])

    def of(self, job: Job[R]) -> R:
        """The result of a job that must not have failed."""
        found = self[job]
        if isinstance(found, Failed):
            raise FedveilError(job.name, found.failed)
        return found


@dataclass(frozen=True)
class Stale:
    """In place of a result on disk that is no longer valid: the reason, as a clause."""

    why: str


def read_result(job: Job[R], folder: Path, basis: Basis | None = None) -> R | Stale | None:
    """Return the job's result if it is on disk for the same work and basis; None if there is none, or it failed."""
    path = folder / f"{job.name}.json"
    try:
        found = read_json(path)
        if "failed" in found["result"]:
            return None
        if "basis" not in found:
            return Stale("it was kept without the version and the data that it was made from")
        changed = explain_change(TypeAdapter(Basis).validate_python(found["basis"]), basis or Basis())
        if changed is None and found.get("asked") != repr(job.work):
            changed = "the settings changed"
        if changed is not None:
            return Stale(f"{changed} since {written_at(path)}")
        return TypeAdapter(job.result).validate_python(found["result"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # BadArgument and pydantic's are ValueErrors
        return None


def run_job(job: Job[R], folder: Path, progress: Progress, done: Done) -> R | Failed:
    """Do the job's work and keep its result, or why it failed; an earlier result is removed before."""
    path = folder / f"{job.name}.json"
    path.unlink(missing_ok=True)  # files that the work replaces belong to it
    result: R | Failed
    try:
        result = job.work(progress, done)
        plain = TypeAdapter(job.result).dump_python(result, mode="json")
    except FedveilError as error:
        result = Failed(str(error))
    except Exception as error:
        traceback.print_exc()
        result = Failed(f"{type(error).__name__}: {error}")
    if isinstance(result, Failed):
        plain = {"failed": result.failed}
    kept = {"basis": done.basis.plain(), "asked": repr(job.work), "result": plain}
    write_whole(path, to_json(kept, exact=True) + "\n")
    return result


def run_jobs(
    jobs: Sequence[Job[Result]],
    folder: Path,
    *,
    workers: int | None = None,
    show: Show = lambda name, share, what: None,
    digests: Digests | None = None,
) -> Done:
    """All results. Workers are processes, by default one per core; with one, everything stays in this process.

    `digests` are those of the command, if it has computed some already.
    """
    digests = digests or Digests()
    bases = {job.name: digests.basis_of(job.work, job.attacked) for job in jobs}
    known, left = dict[str, Result](), list[Job[Result]]()
    for job in jobs:
        found = read_result(job, folder, bases[job.name])
        if isinstance(found, Result):
            known[job.name] = found
            show(job.name, 1.0, "kept")
        else:
            left.append(job)
            show(job.name, 0.0, f"{AGAIN}: {found.why}" if isinstance(found, Stale) else "waiting")
    workers = min(len(left), workers or os.cpu_count() or 1)
    with _safe_path():
        every = (_side_by_side if workers > 1 else _one_by_one)(left, folder, workers, show, known, bases)
    return Done({job.name: every[job.name] for job in jobs})


Bases = Mapping[str, Basis]  # by the name of a job


def _needed(job: Job[Result], found: Mapping[str, Result], bases: Bases) -> Done | Failed:
    """What a job needs, or why it cannot be done: one that it needs failed."""
    needed = {need.name: found[need.name] for need in job.needs}
    broken = next(((name, one) for name, one in needed.items() if isinstance(one, Failed)), None)
    return Failed(f"{broken[0]}: {broken[1].failed}") if broken else Done(needed, bases[job.name])


def _one_by_one(
    jobs: Sequence[Job[Result]], folder: Path, workers: int, show: Show, known: Mapping[str, Result], bases: Bases
) -> dict[str, Result]:
    """In the order given, in which a job comes after those that it needs."""
    found = dict(known)
    for job in jobs:
        done = _needed(job, found, bases)
        found[job.name] = done if isinstance(done, Failed) else run_job(job, folder, partial(show, job.name), done)
        show(job.name, 1.0, "done")
    return found


News = Queue[tuple[str, float, str]]
_news: News | None = None  # where a worker process says how far it is


def _start(news: News, parent: int) -> None:
    global _news
    _news = news
    _watch(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; only the parent has something to say
    torch.set_num_threads(1)  # one worker per core
    torch.set_flush_denormal(True)  # weights of dead units decay to denormals, which made a round seven times slower


def _watch(parent: int) -> None:
    """End this process when the one that asked for it is gone: two runs must never work in one folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(job: Job[Result], folder: Path, done: Done) -> Result:
    assert _news is not None
    news = _news
    return run_job(job, folder, lambda share, what: news.put((job.name, share, what)), done)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that start now do not look into the working directory first, as Python does by itself."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _side_by_side(
    jobs: Sequence[Job[Result]], folder: Path, workers: int, show: Show, known: Mapping[str, Result], bases: Bases
) -> dict[str, Result]:
    """In worker processes; a fresh interpreter each, since a fork would copy torch's threads half alive."""
    context = multiprocessing.get_context("spawn")
    found, waiting = dict(known), list(jobs)
    manager = SyncManager(ctx=context)
    manager.start(_watch, (os.getpid(),))
    with manager:
        news: News = manager.Queue()
        with ProcessPoolExecutor(workers, context, _start, (news, os.getpid())) as pool:
            running: dict[Future[Result], str] = {}
            while waiting or running:
                for job in [job for job in waiting if all(need.name in found for need in (*job.needs, *job.after))]:
                    waiting.remove(job)
                    done = _needed(job, found, bases)
                    if isinstance(done, Failed):
                        found[job.name] = done
                    else:
                        running[pool.submit(_work, job, folder, done)] = job.name
                finished, _ = wait(running, POLL, "FIRST_COMPLETED")
                while not news.empty():
                    show(*news.get())
                for future in finished:
                    name, error = running.pop(future), future.exception()
                    found[name] = Failed(f"its process died: {error}") if error else future.result()
                    show(name, 1.0, "done")
    return found
