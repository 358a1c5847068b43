"""Run FLARE jobs in the simulator, or submit them to a deployment and resubmit them if they end early."""

import contextlib
import inspect
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import RunStatus
from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.api_spec import InternalError, NoConnection, NoReply, SessionClosed, TargetType
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.recipe import SimEnv

from fedveil.checks import check_count
from fedveil.errors import BadArgument, FedveilError
from fedveil.federation.protocol import clean
from fedveil.nvflare.kits import configure
from fedveil.nvflare.server import GROUP, PROGRESS

POLL_INTERVAL = 1.0  # seconds between requests for a job's status
LOGIN_TIMEOUT = 30.0  # seconds
START_TIMEOUT = 120.0  # seconds within which every site must have started a job
SLOW_START = 20.0  # seconds after which a job that has not started is reported
CONNECTION_ERRORS = (NoConnection, NoReply, SessionClosed, InternalError)  # raised while the server is down or starting


class JobFailed(FedveilError):
    """A FLARE job that did not finish."""


class Job(CollabRecipe):  # type: ignore[misc]
    """A FLARE job with an object for the server and one for the clients.

    Args:
        name: the job's name.
        server: an object with one method marked `@collab.main`, which creates a `fedveil.nvflare.Server` and trains.
        client: a `fedveil.nvflare.Client`.
        sites: number of sites that must be connected for the job to start.
        installed: whether the classes' packages are installed on the server and on every site, so that no code is sent.
            Sites must list these packages (docs/nvflare.md). By default, their source files are sent, but never those
            of fedveil.

    An argument of either object must not be text in braces, such as JSON: FLARE treats such text as the name of a
        variable.
    """

    def __init__(self, name: str, server: object, client: object, *, sites: int = 1, installed: bool = False) -> None:
        check_count(type(self).__name__, "sites", sites)
        for part in (server, client):
            for argument in inspect.signature(type(part).__init__).parameters:
                value = getattr(part, argument, getattr(part, f"_{argument}", None))
                _refuse_variables(f"{type(part).__name__}.{argument}", value)
        super().__init__(name, server=server, client=client, min_clients=sites, sync_task_timeout=START_TIMEOUT)
        self.packages = [type(part).__module__.partition(".")[0] for part in (server, client)]
        self._job.set_app_packages(["fedveil", *(self.packages if installed else [])])

    @staticmethod
    def _user_source_entries(objs: Sequence[object]) -> list[tuple[str, str | None]]:
        """Return an empty list, because FLARE itself finds the classes' modules and their imports."""
        return []


def _refuse_variables(where: str, value: object) -> None:
    """Refuse text that FLARE would replace with the value of a variable."""
    if isinstance(value, str) and value.strip().startswith("{") and value.strip().endswith("}"):
        message = f"the text {clean(value)!r} is in braces, so FLARE treats it as the name of a variable"
        raise BadArgument(where, message, "pass a dict instead of JSON, or remove the braces")
    if isinstance(value, Mapping | list | tuple):
        for key in value if isinstance(value, Mapping) else range(len(value)):
            _refuse_variables(f"{where}[{key!r}]", value[key])


def simulate(job: Job, sites: int, workspace: Path) -> None:
    """Run a job in FLARE's simulator: one process for the server and one per site (site-1, site-2, ...), no TLS."""
    configure(workspace / job.job_name, *job.packages)
    try:
        job.run(SimEnv(num_clients=sites, workspace_root=str(workspace)))
    except RuntimeError as error:
        raise JobFailed(job.job_name, str(error), "read the server's log") from error


def submit(
    job: Job,
    kit: Path,
    username: str,
    *,
    attempts: int = 5,
    patience: float = 600.0,
    on_status: Callable[[str], None] = print,
) -> str:
    """Submit a job to a deployment, wait until it ends, and return its id.

    FLARE ends a job when a client's process dies, and loses the job when the server dies. In both cases, the job is
    submitted again, and its server continues from the checkpoint.

    Args:
        job: the job.
        kit: startup kit of the user who submits it.
        username: that user's name.
        attempts: number of submissions before giving up.
        patience: seconds to wait for a server that cannot be reached.
        on_status: a function that is called with a line of text after each change.
    """
    check_count("submit", "attempts", attempts)
    admin = _Admin(kit, username, patience, on_status)
    status = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(admin):
        job.export(folder)
        for attempt in range(1, attempts + 1):
            job_id = admin.call_method("submit_job", str(Path(folder) / job.job_name))
            on_status(f"job {job_id} was submitted" + (f", attempt {attempt} of {attempts}" if attempt > 1 else ""))
            status = admin.wait_for_end(job_id)
            on_status(f"job {job_id}: {status}")
            if status == RunStatus.FINISHED_COMPLETED:
                return str(job_id)
    fix = "read the job's log on the server; another submission continues from the checkpoint"
    raise JobFailed(
        job.job_name, f"none of {attempts} submissions completed; the last one ended with status {status}", fix
    )


def read_progress(kit: Path, username: str, job_id: str) -> str:
    """Return the status of a job and, while it trains, its progress.

    Args:
        kit: startup kit of a user.
        username: that user's name.
        job_id: the id that `submit` returned or printed.
    """
    with contextlib.closing(_Admin(kit, username, LOGIN_TIMEOUT, print)) as admin:
        status = admin.call_method("get_job_status", job_id)
        return ": ".join(filter(None, [str(status), admin.progress(job_id)]))


class _Admin:
    """A session with FLARE's server, which is reopened if the connection is lost."""

    def __init__(self, kit: Path, username: str, patience: float, report: Callable[[str], None]) -> None:
        self._kit, self._username, self._patience, self._report = kit, username, patience, report
        self._session: Any = None
        self._sessions = 0  # number of sessions opened so far

    def wait_for_end(self, job_id: str) -> str:
        """Wait until a job ends, and return its status. A restarted server still lists its old jobs as running."""
        sessions, last_report, start_time = self._sessions, "", time.monotonic()
        while not (status := str(self.call_method("get_job_status", job_id))).startswith("FINISHED"):
            if status == RunStatus.SUBMITTED and time.monotonic() - start_time > SLOW_START:
                connected_sites = (
                    ", ".join(sorted(str(site.name) for site in self.call_method("get_system_info").client_info))
                    or "none"
                )
                status += f", waiting for sites; connected: {connected_sites}"
            if self._sessions > sessions and status in (RunStatus.RUNNING, RunStatus.DISPATCHED):
                if job_id not in [job.job_id for job in self.call_method("get_system_info").job_info]:
                    return "LOST, because the server was restarted"
                sessions = self._sessions
            if status == RunStatus.RUNNING and (line := self.progress(job_id)):
                status += f", {line}"
            if status != last_report:
                self._report(f"job {job_id}: {status}")
            last_report = status
            time.sleep(POLL_INTERVAL)
        return status

    def progress(self, job_id: str) -> str:
        """Return the progress of a running job's server; empty if it is unknown or the user may not see it."""
        with contextlib.suppress(Exception):  # the next call of `call_method` detects a lost server
            result = self._session.show_stats(job_id, TargetType.SERVER)
            return str(result[TargetType.SERVER][GROUP][PROGRESS])
        return ""

    def call_method(self, method: str, *arguments: str) -> Any:
        """Call a method of the session; give up if the server cannot be reached for `patience` seconds."""
        deadline, was_reported = time.monotonic() + self._patience, False
        while True:
            try:
                if self._session is None:
                    self._session = new_secure_session(self._username, str(self._kit), timeout=LOGIN_TIMEOUT)
                    self._sessions += 1
                return getattr(self._session, method)(*arguments)
            except CONNECTION_ERRORS as error:
                self.close()
                if time.monotonic() >= deadline:
                    message = f"the server could not be reached for {self._patience:g} s: {error}"
                    raise JobFailed(str(self._kit), message, "start the server, then submit again") from error
                if not was_reported:
                    self._report(f"the server cannot be reached ({type(error).__name__}); trying again")
                was_reported = True
                time.sleep(POLL_INTERVAL)

    def close(self) -> None:
        """Log out, if the server can be reached."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()
