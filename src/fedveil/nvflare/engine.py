"""FLARE's sites as a transport: one call per site and message, which returns bytes or a fault."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue

from nvflare.collab.api.exceptions import CollabCallError, RunAborted
from nvflare.collab.api.proxy import Proxy

from fedveil.federation.protocol import Fault, FaultKind, Member

LOG = logging.getLogger("fedveil.nvflare")
PROBE_TIMEOUT, PROBE_PAUSE = 5.0, 2.0  # seconds to wait for the reply to a probe, and between probes
GRACE_SECONDS = 5.0  # seconds after a call's timeout within which FLARE itself should report the timeout
Outcome = tuple[Member, bytes | Fault | RunAborted]


class FlareTransport:
    """The sites of a FLARE job, through the proxies in `collab.clients`.

    A site that is silent or cannot be reached is excluded from further rounds until it replies to a probe. A killed
    site therefore delays only one round by the timeout.
    """

    def __init__(self, sites: Sequence[Proxy]) -> None:
        self._sites: dict[Member, Proxy] = {site.name: site for site in sorted(sites, key=lambda site: str(site.name))}
        self._unavailable: set[Member] = set()
        self._closed = threading.Event()

    def members(self) -> list[Member]:
        """Return the available sites of the job."""
        return [name for name in self._sites if name not in self._unavailable]

    def ask(
        self, common: bytes, extras: Mapping[Member, bytes], *, label: str, timeout: float
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """See `Transport.ask`. Raises `RunAborted` if FLARE aborts the job."""
        outcomes, deadline = SimpleQueue[Outcome](), time.monotonic() + timeout + GRACE_SECONDS
        for name, extra in extras.items():
            threading.Thread(
                target=lambda name=name, extra=extra: outcomes.put((name, self._call(name, common, extra, timeout))),
                name=f"ask {name} {label}",
                daemon=True,
            ).start()
        pending = dict.fromkeys(extras)
        while pending:
            try:
                name, result = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if isinstance(result, RunAborted):
                raise result
            del pending[name]
            yield name, result
        for name in pending:
            self._exclude(name)
            yield name, Fault(name, FaultKind.SILENT, f"no answer within {timeout:g} s")

    def close(self) -> None:
        """Stop probing unavailable sites; FLARE ends the job."""
        self._closed.set()

    def _call(self, name: Member, common: bytes, extra: bytes, timeout: float) -> bytes | Fault | RunAborted:
        try:
            result = self._sites[name](timeout=timeout).answer(common, extra)
        except RunAborted as error:
            return error
        except CollabCallError as error:
            self._exclude(name)
            if isinstance(error.cause, TimeoutError):
                return Fault(name, FaultKind.SILENT, f"no answer within {timeout:g} s")
            return Fault(name, FaultKind.UNREACHABLE, str(error.cause))
        except Exception as error:  # FLARE's decoder may raise any exception on malformed bytes
            return Fault(name, FaultKind.UNREADABLE, f"{type(error).__name__}: {error}")
        if isinstance(result, bytes):
            return result
        if isinstance(result, str):  # the client's reason for not answering
            return Fault(name, FaultKind.RAISED, result)
        return Fault(name, FaultKind.MALFORMED, f"expected bytes from the site, got {type(result).__name__}")

    def _exclude(self, name: Member) -> None:
        if name not in self._unavailable:
            self._unavailable.add(name)
            threading.Thread(target=self._watch, args=(name,), name=f"watch {name}", daemon=True).start()

    def _watch(self, name: Member) -> None:
        """Probe a site until it is ready again."""
        LOG.warning("site %s is excluded until it replies again", name)
        while not self._closed.wait(PROBE_PAUSE):
            try:
                is_ready = self._sites[name](timeout=PROBE_TIMEOUT).ready()
            except RunAborted:
                return
            except Exception:  # still unavailable
                continue
            if is_ready is True:
                self._unavailable.discard(name)
                LOG.warning("site %s is available again", name)
                return
