"""Jobs: parts of a long computation that run in parallel and store their results on disk.

An interrupted computation can be resumed: a job does not run again if its result is on disk and was computed from the
same task and basis (version, data, code, checkpoint). If a job fails, the jobs that depend on it fail too; all others
run.
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
from datetime import datetime
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import torch
from pydantic import TypeAdapter

from fedveil.errors import FedveilError
from fedveil.files import write_atomically
from fedveil.plain_json import read_json, to_json
from fedveil.progress import Progress
from fedveil.studies.basis import COMPUTED_AGAIN, Basis, Digests, explain_change

JobProgress = Callable[[str, float, str], None]  # called with the job's name, the fraction done and the current step
POLL_SECONDS = 0.2  # interval between checks for finished jobs


def show_nothing(name: str, fraction: float, step: str) -> None:
    """Ignore progress."""


class Result:
    """Base class for job results, which are frozen dataclasses that pydantic can write as JSON and read back."""


@dataclass(frozen=True)
class Failure(Result):
    """The result of a job that failed, with the reason."""

    failed: str


R = TypeVar("R", bound=Result, covariant=True)
K = TypeVar("K")
V = TypeVar("V")


def successes(results: Mapping[K, V | Failure]) -> dict[K, V]:
    """Return the results of the jobs that did not fail."""
    return {name: result for name, result in results.items() if not isinstance(result, Failure)}


class JobTask(Protocol[R]):
    """The task of a job: a callable frozen dataclass whose fields determine the result.

    It may be called in a separate process.
    """

    def __call__(self, progress: Progress, results: "JobResults") -> R:
        """Compute the result; `results` contains the results of the jobs that this job depends on."""


@dataclass(frozen=True)
class StudyJob(Generic[R]):
    """One part of a computation.

    Attributes:
        name: name of the job and of its file, unique within a folder.
        task: callable that computes the result. A stored result is reused if the task's repr, the data and the code
            have not changed.
        result: type of the result.
        dependencies: jobs that must succeed first; the task receives their results.
        predecessors: jobs that must end first, even if they fail.
        attacked_run: folder of a user's run that the task attacks; a new checkpoint there invalidates the result.
    """

    name: str
    task: JobTask[R]
    result: type[R]
    dependencies: tuple["StudyJob[Result]", ...] = ()
    predecessors: tuple["StudyJob[Result]", ...] = ()
    attacked_run: Path | None = None


class JobResults:
    """The results of jobs, and the basis of the job that receives them; `results[job]` has the job's result type."""

    def __init__(self, results: Mapping[str, Result], basis: Basis | None = None) -> None:
        self._results = dict(results)
        self.basis = basis or Basis()

    def __getitem__(self, job: StudyJob[R]) -> R | Failure:
        return cast("R | Failure", self._results[job.name])

    def require(self, job: StudyJob[R]) -> R:
        """Return the result of a job; raise a FedveilError if the job failed."""
        result = self[job]
        if isinstance(result, Failure):
            raise FedveilError(job.name, result.failed)
        return result


def read_result(job: StudyJob[R], folder: Path, basis: Basis | None = None) -> R | str | None:
    """Read a job's stored result.

    Returns the reason as a string if the result is no longer valid, and None if it is missing or a failure.
    """
    path = folder / f"{job.name}.json"
    try:
        result = read_json(path)
        if "failed" in result["result"]:
            return None
        change = explain_change(TypeAdapter(Basis).validate_python(result["basis"]), basis or Basis())
        if change is None and result.get("asked") != repr(job.task):
            change = "the settings changed"
        if change is not None:
            written_at = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes")
            return f"{change} since {written_at}"
        return TypeAdapter(job.result).validate_python(result["result"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # includes BadArgument and pydantic's errors
        return None


def run_job(job: StudyJob[R], folder: Path, progress: Progress, results: JobResults) -> R | Failure:
    """Remove any earlier result, run the job, and store its result or the reason for its failure."""
    path = folder / f"{job.name}.json"
    path.unlink(missing_ok=True)  # the task is about to replace the files of the earlier result
    result: R | Failure
    try:
        result = job.task(progress, results)
        content = TypeAdapter(job.result).dump_python(result, mode="json")
    except FedveilError as error:
        result = Failure(str(error))
    except Exception as error:
        traceback.print_exc()
        result = Failure(f"{type(error).__name__}: {error}")
    if isinstance(result, Failure):
        content = {"failed": result.failed}
    contents = {"basis": results.basis.to_plain(), "asked": repr(job.task), "result": content}
    write_atomically(path, to_json(contents, exact=True) + "\n")
    return result


def run_jobs(
    jobs: Sequence[StudyJob[Result]],
    folder: Path,
    *,
    workers: int | None = None,
    show: JobProgress = show_nothing,
    digests: Digests | None = None,
) -> JobResults:
    """Run the jobs that have no valid result in the folder, and return all results.

    Args:
        jobs: the jobs, each listed after its dependencies.
        folder: folder with a file for each job.
        workers: number of processes, by default one per core; if 1, all jobs run in this process.
        show: called with a job's name, the fraction done and the current step.
        digests: digests of data and code, each computed once; pass the same object to share them between calls.
    """
    digests = digests or Digests()
    bases = {job.name: digests.job_basis(job.task, job.attacked_run) for job in jobs}
    result, remaining = dict[str, Result](), list[StudyJob[Result]]()
    for job in jobs:
        stored_result = read_result(job, folder, bases[job.name])
        if isinstance(stored_result, Result):
            result[job.name] = stored_result
            show(job.name, 1.0, "reused")
        else:
            remaining.append(job)
            show(job.name, 0.0, f"{COMPUTED_AGAIN}: {stored_result}" if stored_result else "waiting")
    workers = min(len(remaining), workers or os.cpu_count() or 1)
    if workers <= 1:
        _schedule(
            remaining,
            result,
            bases,
            lambda job, job_results: _run_in_this_process(job, folder, show, job_results),
            None,
            show,
        )
    else:
        context = multiprocessing.get_context("spawn")  # fork is unsafe once torch has started threads
        queue: ProgressQueue = context.SimpleQueue()
        with _safe_path(), ProcessPoolExecutor(workers, context, _set_up_worker, (queue, os.getpid())) as pool:
            _schedule(
                remaining,
                result,
                bases,
                lambda job, job_results: pool.submit(_run_in_worker, job, folder, job_results),
                queue,
                show,
            )
    return JobResults({job.name: result[job.name] for job in jobs})


def _schedule(
    jobs: Sequence[StudyJob[Result]],
    results: dict[str, Result],
    bases: Mapping[str, Basis],
    submit: Callable[[StudyJob[Result], JobResults], Future[Result]],
    queue: "ProgressQueue | None",
    show: JobProgress,
) -> None:
    """Submit each job once its dependencies have ended, and add its result to `results`."""
    waiting_jobs, running_jobs = list(jobs), dict[Future[Result], str]()
    while waiting_jobs or running_jobs:
        job = next(
            (
                job
                for job in waiting_jobs
                if all(dependency.name in results for dependency in (*job.dependencies, *job.predecessors))
            ),
            None,
        )
        if job is not None:
            waiting_jobs.remove(job)
            dependencies = {dependency.name: results[dependency.name] for dependency in job.dependencies}
            failures = [
                f"{name}: {failure.failed}" for name, failure in dependencies.items() if isinstance(failure, Failure)
            ]
            if failures:
                results[job.name] = Failure(failures[0])
            else:
                running_jobs[submit(job, JobResults(dependencies, bases[job.name]))] = job.name
        finished_futures, _ = wait(running_jobs, POLL_SECONDS if job is None else 0.0, "FIRST_COMPLETED")
        while queue is not None and not queue.empty():
            show(*queue.get())
        for future in finished_futures:
            name, error = running_jobs.pop(future), future.exception()
            results[name] = Failure(f"the worker process died: {error}") if error else future.result()
            show(name, 1.0, "done")


def _run_in_this_process(job: StudyJob[Result], folder: Path, show: JobProgress, results: JobResults) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(run_job(job, folder, partial(show, job.name), results))
    return future


ProgressQueue = SimpleQueue[tuple[str, float, str]]
_queue: ProgressQueue | None = None  # the queue to which a worker process reports its progress


def _run_in_worker(job: StudyJob[Result], folder: Path, results: JobResults) -> Result:
    assert _queue is not None
    put = _queue.put
    return run_job(job, folder, lambda fraction, step: put((job.name, fraction, step)), results)


def _set_up_worker(queue: ProgressQueue, parent: int) -> None:
    """Set up a worker process that exits when its parent exits, so that it cannot interfere with a new run."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    global _queue
    _queue = queue
    threading.Thread(target=watch_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker at once; only the parent prints a message
    torch.set_num_threads(1)  # there is one worker per core
    torch.set_flush_denormal(
        True
    )  # weights of dead units decay to denormals, which would make rounds seven times slower


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Prevent processes started in this context from importing modules from the working directory."""
    previous = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if previous is not None:
            os.environ["PYTHONSAFEPATH"] = previous
