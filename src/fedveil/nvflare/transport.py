"""A site's connection to the server of its job, as FLARE knows it in the job's process on the site."""

from enum import Enum
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.identity import is_mtls_connection

from fedveil.errors import FedveilError


class InsecureTransport(FedveilError):
    """A client of secure aggregation whose connection to the server is not secured."""


class Transport(Enum):
    """How a site reaches the server of its job."""

    SIMULATOR = "simulator"  # processes of one machine, without certificates
    MTLS = "mTLS"  # to the server itself, and both sides show a certificate of the project
    INSECURE = "insecure"  # any other: clear, TLS with a certificate of the server only, through a relay


def transport() -> Transport:
    """Tell how the site on which FLARE runs this call reaches the server.

    FLARE's SECURE_MODE does not tell: it is set in a project with `connection_security: clear`, too. The settings of
    the connection itself do. TLS without certificates of the sites is not enough: FLARE's server then takes the name
    of a connection from whoever opens it, and routes answers by that name. Behind a relay the job has no connection to
    the server, and relays do not check who sent a message.
    """
    if collab.fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False):
        return Transport.SIMULATOR
    connector = _cell().bb_ext_connector
    secure = connector is not None and is_mtls_connection(connector.get_connection_params())
    return Transport.MTLS if secure and not connects_directly() else Transport.INSECURE


def require_secure_transport() -> None:
    """Refuse to go on over a connection that others can read or open in the server's name; the simulator is exempt."""
    if transport() is Transport.INSECURE:
        what = "this client takes part in secure aggregation, and its connection to the server is not mTLS"
        fix = "provision with `connection_security: mtls`, without relays"
        raise InsecureTransport("FLARE", what, fix)


def connects_directly() -> bool:
    """Whether this site's job has connections to other cells than the server's, or accepts them.

    They are never secured, and the other end chooses its name: it may call itself the server.
    """
    cell = _cell()
    return bool(cell.connector_manager.adhoc_allowed or any(cell.adhoc_connectors.values()))


def decline_direct_connections() -> None:
    """Have the job's process on this machine open no connection on the invitation of a message.

    FLARE opens one for any participant that asks for it by a header, even if its settings allow no such connections.
    """
    _cell().add_incoming_filter("*", "*", _remove_invitation)


def _remove_invitation(message: Any) -> None:
    message.remove_header(MessageHeaderKey.CONN_URL)


def _cell() -> Any:
    return collab.fl_ctx.get_engine().get_cell().core_cell
