"""The client's side: an object that FLARE keeps on a site for the length of a job."""

import logging
import sys
import threading
import traceback
import zlib
from abc import ABC, abstractmethod
from pathlib import Path

from nvflare.collab import collab
from torch import nn

from fedveil.defences.interface import AnyDefence
from fedveil.errors import FedveilError
from fedveil.federation import remote
from fedveil.federation.engine import clean
from fedveil.nvflare.transport import connects_directly, decline_direct_connections, require_secure_transport
from fedveil.records.sources import Given
from fedveil.scheme.losses import Function
from fedveil.secagg import Party

LOG = logging.getLogger("fedveil.nvflare")
SERVER = "server"  # FLARE's name for the server of a job, in the simulator and in every deployment
REFUSAL = "refused: only the server of this job may call this site"


def called_by_server() -> bool:
    """Whether the server of the job makes the call that this thread answers; any other caller is logged.

    FLARE names the caller by the origin of the message and its list of the job's participants, not by what the caller
    says, and sends the answer to that origin. Over mTLS a connection bears the name of its certificate: the answer
    reaches the server and nobody else. The origin alone is no proof: FLARE 2.9 lets a hostile site send a message in
    the server's name, though it does not see the answer. Without mTLS, and in the simulator, whoever claims the
    server's name has it. A site that bears that name, or connections that go past the server, make it worthless over
    mTLS, too; then no caller is taken for the server.
    """
    caller = collab.caller
    if caller != SERVER:
        reason = "it is not the server of this job"
    elif any(site.name == SERVER for site in collab.clients):
        reason = "a site of this job has the same name"
    elif connects_directly():
        reason = "this site has or allows connections that go past the server"
    else:
        return True
    LOG.warning("refused a call by %s: %s", clean(caller), reason)
    return False


class Client(ABC):
    """The client on a site: derive from it to say how to build the network and how the site loads its records.

    FLARE builds one on every site from the arguments of its constructor, which must be plain values that are kept as
    attributes of the same names. Records are loaded once, with the first round, and stay in memory.
    """

    defence: AnyDefence | None = None  # insist on these settings of a defence, whatever the server says
    loss: Function | None = None  # the server's own function, if its loss has no name
    folder: Path | None = None  # where private state (SPN's head, PPDL's noise) outlives the job
    party: Party | None = None  # for secure aggregation; by default from the site's FEDVEIL_IDENTITY, FEDVEIL_ROSTER

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The network; its values are ignored."""

    @abstractmethod
    def load_data(self, site: str) -> Given:
        """This site's (inputs, targets)."""

    def number(self, site: str) -> int:
        """This client's number, which decides the order of its batches; by default made from the site's name."""
        return zlib.crc32(site.encode())

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """FLARE calls it when the job starts on this site."""
        decline_direct_connections()
        self._site: str = collab.site_name
        self._lock, self._arrived = threading.Lock(), 0
        self._model: nn.Module | None = None
        self._data: Given | None = None
        self._state: remote.ClientState | None = None
        self._file = self.folder / f"fedveil-{self._site}.pt" if self.folder is not None else None

    @collab.publish  # type: ignore[untyped-decorator]
    def ready(self) -> bool | str:
        """Whether this site has nothing else to do; the server alone is told."""
        return not self._lock.locked() if called_by_server() else REFUSAL

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, common: bytes, own: bytes) -> bytes | str:
        """The answer to an ask of the server, or why there is none. Other callers change nothing here.

        FLARE sends tracebacks of what is raised here to the server, and a traceback may hold records. So nothing is
        raised: the server gets the text of Fedveil's errors, which hold none, and of others the name alone. The
        traceback goes to this site's stderr, not to FLARE's logs: they may be streamed to the server.
        """
        if not called_by_server():
            return REFUSAL
        self._arrived += 1
        number = self._arrived
        with self._lock:
            if number != self._arrived:  # it waited behind an ask that took too long
                return "a newer message arrived before this one was begun"
            try:
                return self._answer(common, own)
            except FedveilError as error:
                return f"{type(error).__name__}: {error}"
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                return f"{type(error).__name__} on the site; its stderr has the traceback"

    def _answer(self, common: bytes, own: bytes = b"") -> bytes:
        party = self.party or remote.own_party()
        if party is not None:
            require_secure_transport()
        if self._model is None:
            self._model = self.make_model()
        if self._state is None:
            self._state = remote.ClientState(private=remote.load_private(self._file))
        found, state = remote.reply(
            common,
            self._state,
            self._model,
            self._records,
            client=self.number(self._site),
            defence=self.defence,
            loss=self.loss,
            party=party,
            policy=remote.own_policy(),
            own=own,
        )
        if self._file is not None and state.private:
            remote.save_private(self._file, state.private)
        self._state = state
        return found

    def _records(self) -> Given:
        if self._data is None:
            self._data = self.load_data(self._site)
        return self._data
