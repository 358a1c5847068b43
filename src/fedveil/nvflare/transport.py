"""The security of a site's connection to the server, as FLARE knows it in the job's process."""

from enum import Enum
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.identity import is_mtls_connection

from fedveil.errors import FedveilError


class InsecureTransport(FedveilError):
    """A client in secure aggregation whose connection to the server is not secure."""


class ConnectionSecurity(Enum):
    """How a site reaches the server of its job."""

    SIMULATOR = "simulator"  # processes of one machine, without certificates
    MTLS = "mTLS"  # to the server itself, and both sides show a certificate of the project
    INSECURE = "insecure"  # any other: clear, TLS with a certificate of the server only, through a relay


def transport() -> ConnectionSecurity:
    """Return how the site of the current call reaches the server.

    FLARE's SECURE_MODE does not show it: it is also set in a project with `connection_security: clear`. The settings of
    the connection do. TLS without certificates of the sites is not enough: FLARE's server then accepts the name that a
    connection claims, and routes replies by that name. Behind a relay the job has no connection to the server, and
    relays do not check who sent a message.
    """
    if collab.fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False):
        return ConnectionSecurity.SIMULATOR
    connector = _cell().bb_ext_connector
    secure = connector is not None and is_mtls_connection(connector.get_connection_params())
    return ConnectionSecurity.MTLS if secure and not connects_directly() else ConnectionSecurity.INSECURE


def require_secure_transport() -> None:
    """Refuse a connection that others can read or open in the server's name; the simulator is exempt."""
    if transport() is ConnectionSecurity.INSECURE:
        what = "this client takes part in secure aggregation, and its connection to the server is not mTLS"
        fix = "provision with `connection_security: mtls`, without relays"
        raise InsecureTransport("FLARE", what, fix)


def connects_directly() -> bool:
    """Return whether this site's job has connections to cells other than the server's, or accepts them.

    They are never secure, and the other end chooses its name: it may call itself the server.
    """
    cell = _cell()
    return bool(cell.connector_manager.adhoc_allowed or any(cell.adhoc_connectors.values()))


def decline_direct_connections() -> None:
    """Let the job's process open no connection that a message invites it to.

    FLARE opens one for any participant that requests it in a header, even if its settings forbid such connections.
    """
    _cell().add_incoming_filter("*", "*", _remove_invitation)


def _remove_invitation(message: Any) -> None:
    message.remove_header(MessageHeaderKey.CONN_URL)


def _cell() -> Any:
    return collab.fl_ctx.get_engine().get_cell().core_cell
