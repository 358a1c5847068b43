"""A client on a FLARE site, which runs for the duration of a job, and checks of callers and connections."""

import logging
import sys
import threading
import traceback
import zlib
from abc import ABC, abstractmethod
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from nvflare.apis.fl_constant import FLContextKey
from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.identity import is_mtls_connection
from torch import nn

from fedveil.defences.interface import AnyDefence
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import load_private_state, save_private_state
from fedveil.federation.client import ClientSession, ClientState
from fedveil.federation.protocol import clean
from fedveil.graph.build import Frozen
from fedveil.graph.outputs import Output
from fedveil.records.sources import UserRecords
from fedveil.scheme.losses import Function
from fedveil.secagg import Party
from fedveil.secagg.environment import load_own_party, load_own_policy

LOG = logging.getLogger("fedveil.nvflare")
SERVER = "server"  # FLARE's name for the server of a job, in the simulator and in every deployment
REFUSAL = "refused: only the server of this job may call this site"


class InsecureTransport(FedveilError):
    """A client takes part in secure aggregation, but its connection to the server is not secure."""


def transport() -> Literal["simulator", "mTLS", "insecure"]:
    """Return the kind of connection between the current site and the server.

    In the simulator, processes on one machine have no certificates. With mTLS, a site connects directly to the server,
    and both present a certificate of the project. All other connections are insecure: clear text, TLS with only a
    server certificate, and relays.

    The kind is determined from the connection's parameters, because FLARE's SECURE_MODE is also set in a project with
    `connection_security: clear`. TLS without site certificates is not enough: FLARE's server then accepts any name that
    a connection claims, and routes replies by this name. Behind a relay, the job has no connection to the server, and
    relays do not check the sender of a message.
    """
    if collab.fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False):
        return "simulator"
    connector = _cell().bb_ext_connector
    is_secure = connector is not None and is_mtls_connection(connector.get_connection_params())
    return "mTLS" if is_secure and not bypasses_server() else "insecure"


def require_secure_transport() -> None:
    """Refuse a connection that others could read or could open in the server's name; the simulator is exempt."""
    if transport() == "insecure":
        message = "this client takes part in secure aggregation, but its connection to the server is not mTLS"
        fix = "provision with `connection_security: mtls`, without relays"
        raise InsecureTransport("FLARE", message, fix)


def bypasses_server() -> bool:
    """Return whether this site's job has connections to cells other than the server's, or accepts them.

    Such connections are never secure, and the other end chooses its own name, which may be the server's.
    """
    cell = _cell()
    return bool(cell.connector_manager.adhoc_allowed or any(cell.adhoc_connectors.values()))


def decline_direct_connections() -> None:
    """Prevent the job's process from opening connections that a message requests.

    FLARE opens a connection for any participant that requests one in a header, even if the settings forbid this.
    """
    _cell().add_incoming_filter("*", "*", lambda message: message.remove_header(MessageHeaderKey.CONN_URL))


def _cell() -> Any:
    return collab.fl_ctx.get_engine().get_cell().core_cell


def called_by_server() -> bool:
    """Return whether the server of the job made the current call; other callers are logged.

    FLARE identifies the caller by the origin of the message and by the job's list of participants, not by the caller's
    claim, and sends the reply to this origin. Over mTLS, a connection has the name in its certificate, so only
    the server receives the reply. The origin alone proves nothing: FLARE 2.9 lets a hostile site send a message in the
    server's name, although it does not see the reply. Without mTLS, and in the simulator, anyone can claim the server's
    name. If a site has that name, or connections bypass the server, the name proves nothing even over mTLS, so no
    caller is accepted as the server.
    """
    caller = collab.caller
    if caller != SERVER:
        reason = "the caller is not the server of this job"
    elif any(site.name == SERVER for site in collab.clients):
        reason = "a site of this job has the same name"
    elif bypasses_server():
        reason = "this site has or allows connections that bypass the server"
    else:
        return True
    LOG.warning("refused a call from %s: %s", clean(caller), reason)
    return False


class Client(ABC):
    """The client on a site. Subclasses define how to build the model and how the site loads its records.

    FLARE creates a client on every site from its constructor's arguments, which must be plain values that are stored as
    attributes with the same names. Records are loaded once, in the first round, and stay in memory.
    """

    defence: AnyDefence | None = None  # a defence whose settings override the server's
    loss: Function | None = None  # the loss function, if the server uses a custom one
    output: Output | None = None  # the function that computes the predictions, if the server uses one
    frozen: Frozen = "sent"  # "local" to use this model's own frozen parameters if the server does not send them
    folder: Path | None = (
        None  # folder in which private state (SPN's head, PPDL's noise generator) is kept after the job
    )
    party: Party | None = None  # for secure aggregation; by default, from FEDVEIL_IDENTITY and FEDVEIL_ROSTER

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Return the model; its values are ignored."""

    @abstractmethod
    def load_data(self, site: str) -> UserRecords:
        """Return this site's (inputs, targets)."""

    def number(self, site: str) -> int:
        """Return the index of this client, which determines the order of its batches."""
        return zlib.crc32(site.encode())

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Prepare this site; called by FLARE when the job starts."""
        decline_direct_connections()
        self._site: str = collab.site_name
        self._lock, self._num_arrivals = threading.Lock(), 0
        self._session: ClientSession | None = None
        self._file = self.folder / f"fedveil-{self._site}.pt" if self.folder is not None else None

    @collab.publish  # type: ignore[untyped-decorator]
    def ready(self) -> bool | str:
        """Return whether this site is idle; refuse calls from anyone but the server."""
        return not self._lock.locked() if called_by_server() else REFUSAL

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, common: bytes, extra: bytes) -> bytes | str:
        """Answer a message from the server, or return the reason for a refusal; calls from others have no effect.

        No exception is raised, because FLARE sends tracebacks to the server, and tracebacks may contain records. The
        server gets the text of Fedveil's errors, which contain no records, but only the names of other errors.
        Tracebacks go to this site's stderr, not to FLARE's logs, which may be streamed to the server.
        """
        if not called_by_server():
            return REFUSAL
        self._num_arrivals += 1
        arrival = self._num_arrivals
        with self._lock:
            if arrival != self._num_arrivals:  # this message was delayed by a request that took too long
                return "a newer message arrived before this message was processed"
            try:
                return self._answer(common, extra)
            except FedveilError as error:
                return f"{type(error).__name__}: {error}"
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                return f"{type(error).__name__} on the site; the traceback is in its stderr"

    def _answer(self, common: bytes, extra: bytes = b"") -> bytes:
        if self._session is None:
            self._session = self._start_session()
        if self._session.party is not None:
            require_secure_transport()
        result = self._session.reply(common, extra)
        if self._file is not None and self._session.state.private:
            save_private_state(self._file, self._session.state.private)
        return result

    def _start_session(self) -> ClientSession:
        party = self.party or load_own_party()
        if party is not None:
            require_secure_transport()  # before the model is built
        return ClientSession(
            self.make_model(),
            cache(partial(self.load_data, self._site)),
            client=self.number(self._site),
            defence=self.defence,
            loss=self.loss,
            output=self.output,
            frozen=self.frozen,
            party=party,
            policy=load_own_policy(),
            state=ClientState(private=load_private_state(self._file)),
        )
