"""A Flower node that stays: one process, its data in memory, which runs the ClientApp that is installed on it.

It speaks the Fleet API of a stock SuperLink and never runs code that the SuperLink sends.
"""

import logging
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.checks import positive
from fedveil.errors import BadArgument, FedveilError
from fedveil.federation.engine import clean
from fedveil.flower.patience import Patience, Stopped
from fedveil.lookup import imported

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from fedveil.flower.fleet import Arrived, Fleet, RunSettings

TESTED = ("1.41.0",)  # versions of Flower whose private modules are what `fedveil.flower.fleet` expects
EXAMPLE = "fedveil flower-node bank_app.client_app:app --app-dir examples/flower_app"
MOST_RUNS = 16  # whose contexts are kept
MOST_ANSWERED = 1024  # messages that are remembered
RAISED = 2  # Flower's code of an app that raised
POLL_SHARE, LONGEST_POLL = 0.05, 3.0  # of the time without a message; seconds
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSettings:
    """How a node reaches its SuperLink; names are those of `flower-supernode`."""

    superlink: str = "127.0.0.1:8000"
    root_certificates: Path | None = None
    insecure: bool = False
    auth_supernode_private_key: Path | None = None
    node_config: str = ""  # "partition-id=0 num-partitions=2"
    max_retries: int | None = None
    max_wait_time: float | None = None
    poll_interval: float = 0.3  # seconds

    def __post_init__(self) -> None:
        positive("--poll-interval", "it", self.poll_interval)
        for given, flag in (
            (self.root_certificates, "--root-certificates"),
            (self.auth_supernode_private_key, "--auth-supernode-private-key"),
        ):
            if self.insecure and given:
                raise BadArgument("--insecure", f"{flag} needs TLS", "leave one of the two out")


def check_version(installed: str | None = None) -> None:
    """Refuse a Flower that this was not tested with: a node uses modules that Flower keeps to itself."""
    try:
        found = installed or version("flwr")
    except PackageNotFoundError as error:
        fix = "pip install 'fedveil[flower]'"
        raise FedveilError("fedveil flower-node", "Flower is not installed", fix) from error
    if found not in TESTED:
        what = f"a node that stays is tested with Flower {', '.join(TESTED)}, and {found} is installed"
        raise FedveilError("fedveil flower-node", what, f"pip install flwr=={TESTED[-1]}, or use flower-supernode")


def load_app(spec: str, folder: Path | None = None) -> "ClientApp":
    """The ClientApp that `package.module:name` names, in a folder or among what is installed."""
    from flwr.clientapp import ClientApp

    if folder is not None:
        if not folder.is_dir():
            raise BadArgument("--app-dir", f"there is no folder {folder}", "the folder that holds the app's package")
        sys.path.insert(0, str(folder.resolve()))
    try:
        found = imported(spec, "a ClientApp", EXAMPLE)
    except FedveilError:
        raise
    except Exception as error:
        raise BadArgument(spec, f"its import raises {type(error).__name__}: {error}") from error
    if not isinstance(found, ClientApp):
        raise BadArgument(spec, f"is a {type(found).__name__}, not a flwr.clientapp.ClientApp", EXAMPLE)
    return found


def error_text(error: BaseException) -> str:
    """What the server may know of an error: Fedveil's own text, which holds no records, or only the error's type."""
    ours = isinstance(error, FedveilError) and type(error).__module__.partition(".")[0] == "fedveil"
    return str(error) if ours else type(error).__name__


@dataclass
class Memory:
    """What a node remembers: a context for each of the last runs, and which messages it has answered."""

    contexts: "OrderedDict[int, Context]" = field(default_factory=OrderedDict)
    answered: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_ANSWERED))

    def context(self, run: int) -> "Context | None":
        """A run's context, which thereby stays longer than others."""
        if run in self.contexts:
            self.contexts.move_to_end(run)
        return self.contexts.get(run)

    def begin(self, run: int, node: int, node_config: dict[str, Any], settings: "RunSettings") -> "Context":
        """The context of a run that is new; it takes the state of its series, as Flower's do."""
        from flwr.app import Context, RecordDict

        same = [old for old in self.contexts.values() if settings.series and old.series_id == settings.series]
        state = same[-1].state if same else RecordDict()
        context = Context(
            run_id=run,
            node_id=node,
            node_config=node_config,
            state=state,
            run_config=settings.config,
            series_id=settings.series,
        )
        self.contexts[run] = context
        while len(self.contexts) > MOST_RUNS:
            self.contexts.popitem(last=False)
        return context


def run_app(app: "ClientApp", message: "Message", context: "Context") -> "Message":
    """The app's reply; what it raises goes to this node's log, and without the text to the server."""
    from flwr.app import Error, Message

    try:
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the app returned a {type(reply).__name__}, not a Message")
    except (Exception, SystemExit) as error:
        log.exception("the app raised")
        return Message(Error(code=RAISED, reason=error_text(error)), reply_to=message)
    return reply


def handle(arrived: "Arrived", app: "ClientApp", fleet: "Fleet", memory: Memory, node_config: dict[str, Any]) -> None:
    """Answer a message, or say in the log why not. Ends the node for nothing that a message holds."""
    from flwr.app import Error, Message

    from fedveil.flower.fleet import NotRunning

    label = f"run {arrived.run}, round {clean(arrived.head.metadata.group_id) or '?'}"
    if arrived.id in memory.answered:
        log.info("%s: ignored, it was answered before", label)
        return
    try:
        try:
            context = memory.context(arrived.run)
            if context is None:
                context = memory.begin(arrived.run, fleet.node, node_config, fleet.settings(arrived.run))
            message = fleet.pull(arrived)
            fleet.confirm(arrived)
        except (NotRunning, Stopped, FedveilError):
            raise
        except Exception as error:
            log.warning("%s: cannot be read (%s: %s)", label, type(error).__name__, clean(error))
            fleet.send(Message(Error(code=RAISED, reason="the message cannot be read"), reply_to=arrived.head), 0.0)
            return
        began = time.perf_counter()
        reply = run_app(app, message, context)
        seconds = time.perf_counter() - began
        memory.answered.append(arrived.id)
        fleet.send(reply, seconds)
        outcome = "answered with an error" if reply.has_error() else "answered"
        log.info("%s: %s after %.2f s of work", label, outcome, seconds)
    except NotRunning as error:
        log.info("%s: not answered, the run has ended (%s)", label, error)
    except (Stopped, FedveilError):
        raise
    except Exception as error:
        log.warning("%s: not answered (%s: %s)", label, type(error).__name__, clean(error))


def poll_pause(idle: float, interval: float) -> float:
    """Seconds until the next look: a node that has had nothing to do for long looks less often."""
    return max(interval, min(POLL_SHARE * idle, LONGEST_POLL))


def attend(app: "ClientApp", fleet: "Fleet", node_config: dict[str, Any], patience: Patience, interval: float) -> None:
    """Answer messages until the process is told to end."""
    memory, last = Memory(), time.monotonic()
    while True:
        try:
            arrived = fleet.receive()
        except (Stopped, FedveilError):
            raise
        except Exception as error:  # a head that cannot be read
            log.warning("a message cannot be read (%s: %s)", type(error).__name__, clean(error))
            arrived = None
        if arrived is None:
            patience.sleep(poll_pause(time.monotonic() - last, interval))
            continue
        handle(arrived, app, fleet, memory, node_config)
        last = time.monotonic()


def serve(spec: str, settings: NodeSettings, folder: Path | None = None) -> None:
    """Run a node until KeyboardInterrupt.

    Args:
        spec: the ClientApp, as package.module:name.
        settings: how the node reaches its SuperLink.
        folder: in which the app's package is, if it is not installed.

    Raises:
        FedveilError: another version of Flower, an app that does not load, a SuperLink that refuses this node or whose
            certificate is not to be trusted, or one that was away for longer than the settings allow.
    """
    check_version()
    from fedveil.flower.fleet import Fleet, node_settings, read_key

    app, key = load_app(spec, folder), settings.auth_supernode_private_key
    patience = Patience(settings.superlink, settings.max_retries, settings.max_wait_time)
    fleet = Fleet(
        settings.superlink,
        insecure=settings.insecure,
        root_certificates=settings.root_certificates.read_bytes() if settings.root_certificates else None,
        keys=read_key(key.read_bytes(), str(key)) if key else None,
        patience=patience,
    )
    node_config = node_settings(settings.node_config)
    try:
        fleet.join()
        log.info("node %s runs %s for the SuperLink at %s", fleet.node, spec, settings.superlink)
        attend(app, fleet, node_config, patience, settings.poll_interval)
    except KeyboardInterrupt:
        log.info("node %s ends", fleet.node)
    finally:
        patience.stop()
        fleet.leave()
