"""A job for FLARE: in the simulator, or submitted to a deployment, again if it ends before its time."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import RunStatus
from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.api_spec import InternalError, NoConnection, NoReply, SessionClosed
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.recipe import SimEnv

from fedveil.checks import whole
from fedveil.errors import FedveilError
from fedveil.nvflare.kits import configure

POLL = 1.0  # seconds
LOGIN = 30.0  # seconds
SLOW_START = 20.0  # seconds after which a job that does not start is worth a word
LOST = (NoConnection, NoReply, SessionClosed, InternalError)  # what a server that is gone or starting looks like


class JobFailed(FedveilError):
    """A job of FLARE that did not come to its end."""


class Job(CollabRecipe):  # type: ignore[misc]
    """A server's object and the clients' as one job.

    Args:
        name: of the job.
        server: an object with one method marked `@collab.main`, which builds a `fedveil.nvflare.Server` and trains.
        client: a `fedveil.nvflare.Client`.
        sites: how many must be there for the job to start.
        installed: the classes' packages are installed on the server and on every site, and no code travels. Sites
            must list them (docs/nvflare.md). By default their source files travel; fedveil itself never does.
        start_timeout: seconds in which every site must have started the job.
    """

    def __init__(
        self,
        name: str,
        server: object,
        client: object,
        *,
        sites: int = 1,
        installed: bool = False,
        start_timeout: float = 120.0,
    ) -> None:
        whole(type(self).__name__, "sites", sites)
        super().__init__(name, server=server, client=client, min_clients=sites, sync_task_timeout=start_timeout)
        self.packages = [type(part).__module__.partition(".")[0] for part in (server, client)]
        self._job.set_app_packages(["fedveil", *(self.packages if installed else [])])

    @staticmethod
    def _user_source_entries(objs: Sequence[object]) -> list[tuple[str, str | None]]:
        """No copies of single files: FLARE finds the classes' modules, and what they import beside them, by itself."""
        return []


def simulate(job: Job, sites: int, workspace: Path) -> None:
    """Run a job in FLARE's simulator: a process for the server and one for each of site-1, site-2 ..., without TLS."""
    configure(workspace / job.job_name, *job.packages)
    try:
        job.run(SimEnv(num_clients=sites, workspace_root=str(workspace)))
    except RuntimeError as error:
        raise JobFailed(job.job_name, str(error), "the log of the server tells why") from error


def submit(
    job: Job,
    kit: Path,
    username: str,
    *,
    attempts: int = 5,
    patience: float = 600.0,
    on_status: Callable[[str], None] = print,
) -> str:
    """Submit a job to a deployment and wait for its end; returns its id.

    FLARE ends a job when a client's process dies, and forgets it when the server does. The job is then submitted again,
    and its server's object goes on from its checkpoint.

    Args:
        job: what to submit.
        kit: the startup kit of the user who submits.
        username: that user's name.
        attempts: how often to submit before giving up.
        patience: seconds to wait for a server that is out of reach.
        on_status: called with a sentence for each change.
    """
    whole("submit", "attempts", attempts)
    admin = _Admin(kit, username, patience, on_status)
    status, job_id = "nothing", ""
    with tempfile.TemporaryDirectory() as folder:
        job.export(folder)
        for attempt in range(1, attempts + 1):
            job_id = admin.do("submit_job", str(Path(folder) / job.job_name))
            on_status(f"job {job_id} is submitted" + (f", attempt {attempt} of {attempts}" if attempt > 1 else ""))
            status = admin.followed(job_id)
            on_status(f"job {job_id}: {status}")
            if status == RunStatus.FINISHED_COMPLETED:
                break
    admin.close()
    if status == RunStatus.FINISHED_COMPLETED:
        return job_id
    fix = "the server's log of the job says why; another submission goes on from the checkpoint"
    raise JobFailed(job.job_name, f"{attempts} submissions ended, the last with {status}", fix)


class _Admin:
    """A session with FLARE's server that is opened again when it is lost."""

    def __init__(self, kit: Path, username: str, patience: float, tell: Callable[[str], None]) -> None:
        self._kit, self._username, self._patience, self._tell = kit, username, patience, tell
        self._session: Any = None
        self._sessions = 0  # that were opened

    def followed(self, job_id: str) -> str:
        """The state in which a job ends. A server that was started again still calls its old jobs running."""
        sessions, told, asked = self._sessions, "", time.monotonic()
        while not (status := str(self.do("get_job_status", job_id))).startswith("FINISHED"):
            if status == RunStatus.SUBMITTED and time.monotonic() - asked > SLOW_START:
                there = ", ".join(sorted(str(site.name) for site in self.do("get_system_info").client_info)) or "none"
                status += f", waiting for sites; there are: {there}"
            if self._sessions > sessions and status in (RunStatus.RUNNING, RunStatus.DISPATCHED):
                if job_id not in [job.job_id for job in self.do("get_system_info").job_info]:
                    return "LOST, the server was started again"
                sessions = self._sessions
            if status != told:
                self._tell(f"job {job_id}: {status}")
            told = status
            time.sleep(POLL)
        return status

    def do(self, method: str, *arguments: str) -> Any:
        """Call a method of the session, within `patience` seconds of being without a server."""
        deadline, told = time.monotonic() + self._patience, False
        while True:
            try:
                if self._session is None:
                    self._session = new_secure_session(self._username, str(self._kit), timeout=LOGIN)
                    self._sessions += 1
                return getattr(self._session, method)(*arguments)
            except LOST as error:
                self.close()
                if time.monotonic() >= deadline:
                    what = f"the server was out of reach for {self._patience:g} s: {error}"
                    raise JobFailed(str(self._kit), what, "start it, then submit again") from error
                if not told:
                    self._tell(f"the server is out of reach ({type(error).__name__}); trying again")
                told = True
                time.sleep(POLL)

    def close(self) -> None:
        """Log out, if the server is there."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()
