"""The Fleet API of a SuperLink, as a SuperNode speaks it. All that Fedveil uses of Flower's private modules is here."""

import logging
import math
import ssl
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import httpx
from click import ClickException
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.config import get_fused_config_from_fab, parse_config_args
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.common.serde import fab_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.address import parse_address
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedveil.errors import BadArgument, FedveilError
from fedveil.federation.engine import clean
from fedveil.flower.patience import Lost, Patience

AWAY = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
STILL_ONLINE = 1.25 * HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL  # s that a SuperLink counts on a killed node
FIRST_LOOK = 0.02  # seconds until an object that was not there is asked for again
LARGEST_SETTINGS = 2**20  # bytes of a FAB's pyproject.toml
log = logging.getLogger(__name__)
Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


class Refused(Exception):
    """The SuperLink understood, and said no."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (code {code})")
        self.code = code


class NotRunning(Exception):
    """The run that a message belongs to has ended."""


@dataclass(frozen=True)
class Arrived:
    """A message of which only the head has arrived."""

    head: Message
    tree: ObjectTree

    @property
    def run(self) -> int:
        """The run that it belongs to."""
        return int(self.head.metadata.run_id)

    @property
    def id(self) -> str:
        """Its name, the same in every delivery."""
        return str(self.head.metadata.message_id)


@dataclass(frozen=True)
class RunSettings:
    """What a node must know of a run: its configuration, and the series that shares a client's state."""

    config: dict[str, Any]
    series: int


def read_key(content: bytes, where: str) -> Keys:
    """The private key in a file of `ssh-keygen -t ecdsa`, and its public key."""
    try:
        key = load_ssh_private_key(content, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        fix = "a private key of `ssh-keygen -t ecdsa` without a passphrase"
        raise BadArgument(where, "holds no elliptic-curve private key that can be read", fix) from error
    return key, key.public_key()


def settings_of(fab: bytes, run: Any) -> dict[str, Any]:
    """A run's configuration: the defaults in a FAB's pyproject.toml, and what `flwr run -c` said. Nothing is run."""
    with zipfile.ZipFile(BytesIO(fab)) as archive:
        if archive.getinfo("pyproject.toml").file_size > LARGEST_SETTINGS:
            raise ValueError("its pyproject.toml is too large")
    found: dict[str, Any] = get_fused_config_from_fab(fab, run)
    return found


def node_settings(words: str) -> dict[str, Any]:
    """`--node-config` as Flower reads it: key=value with blanks between them, or the name of a TOML file."""
    try:
        found: dict[str, Any] = parse_config_args([words] if words else None)
    except (ClickException, ValueError) as error:
        raise BadArgument("--node-config", f"{words!r} cannot be read", "partition-id=0 num-partitions=2") from error
    if words and not found:
        raise BadArgument("--node-config", f"{words!r} sets nothing", "partition-id=0 num-partitions=2")
    return found


class Fleet:
    """A node's connection to its SuperLink, which outlives the SuperLink's absence.

    Args:
        superlink: host:port.
        insecure: without TLS.
        root_certificates: PEM; by default those of the system.
        keys: by default new ones, with which the node registers itself.
        patience: for calls that do not get through.
    """

    def __init__(
        self, superlink: str, *, insecure: bool, root_certificates: bytes | None, keys: Keys | None, patience: Patience
    ) -> None:
        self._patience, self._own_keys, self._where = patience, keys is None, superlink
        private, public = keys or generate_key_pairs()
        self._public = public_key_to_bytes(public)
        signer = NodeAuthHttpInterceptor(private, public)
        try:
            self._client = FleetHttpClient.from_server_address(
                _address(superlink),
                insecure,
                root_certificates,
                interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperNode"), signer],
            )
        except (ssl.SSLError, UnicodeError) as error:
            raise BadArgument("--root-certificates", f"it holds no PEM certificates: {error}", "ca.crt") from error
        self._heartbeat: HeartbeatSender | None = None
        self._forgotten = threading.Event()  # the SuperLink does not know this node any more
        self._node = Node()

    @property
    def node(self) -> int:
        """The node's number."""
        return int(self._node.node_id)

    def join(self) -> None:
        """Become one of the nodes that are asked; without a key of its own, register first.

        A SuperLink that refuses the node at its start ends it: at once, or, if the reason may be that it still counts
        on a node that was killed, after the time that this takes. Later the node goes on trying.

        Raises:
            FedveilError: the SuperLink refuses this node, or its certificate is not to be trusted.
        """
        first, refused_since = self._heartbeat is None, math.inf

        def enter() -> None:
            nonlocal refused_since
            try:
                if first or not self._known():
                    self._enter()
            except Refused as error:
                refused_since = min(refused_since, time.monotonic())
                unclear = error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
                if first and not (unclear and time.monotonic() - refused_since < STILL_ONLINE):
                    raise self._explained(error) from error
                hint = ": its key is not registered, or its last process was killed a moment ago" if unclear else ""
                raise Lost(f"it refuses this node: {error}{hint}") from error

        self._patience(enter)
        self._forgotten.clear()
        if not first:
            log.info("admitted again, as node %s", self.node)
            return
        self._heartbeat = HeartbeatSender(self._beat)
        self._heartbeat.start()

    def leave(self) -> None:
        """Say goodbye, if the SuperLink is there to hear it."""
        if self._heartbeat is not None:
            if self._heartbeat.is_running:
                self._heartbeat.stop()
            calls: list[tuple[Callable[[Any], Any], Any]]
            calls = [(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self.node))]
            if self._own_keys:
                calls += [(self._client.UnregisterNode, UnregisterNodeFleetRequest(node_id=self.node))]
            for method, request in calls:
                try:
                    self._once(method, request)
                except (Lost, Refused, NotRunning, FedveilError):
                    break
        self._client.close()

    def receive(self) -> Arrived | None:
        """The head of the next message, if there is one."""
        if self._forgotten.is_set():
            self.join()
        response = self._patience(self._poll)
        if response is None:
            self.join()
        if response is None or not response.messages_list:
            return None
        return Arrived(message_from_proto(response.messages_list[0]), response.message_object_trees[0])

    def settings(self, run: int) -> RunSettings:
        """What a node must know of a run. Of its app only the configuration is read."""
        found = run_from_proto(self._call(self._client.GetRun, GetRunRequest(node=self._node, run_id=run)).run)
        request = GetFabRequest(node=self._node, hash_str=found.fab_hash, run_id=run)
        fab = fab_from_proto(self._call(self._client.GetFab, request).fab)
        return RunSettings(settings_of(fab.content, found), found.series_id)

    def pull(self, arrived: Arrived) -> Message:
        """The whole message."""
        ids = list(dict.fromkeys(piece.object_id for piece in iterate_object_tree(arrived.tree)))
        pull = make_pull_object_fn_protobuf(lambda r: self._call(self._client.PullObject, r), self._node, arrived.run)
        contents = pull_objects(ids, pull, initial_backoff=FIRST_LOOK, max_time=arrived.head.metadata.ttl)
        message = inflate_object_from_contents(arrived.tree.object_id, contents)
        if not isinstance(message, Message):
            raise ValueError("it is no message")
        message.metadata.__dict__["_message_id"] = arrived.id
        return message

    def confirm(self, arrived: Arrived) -> None:
        """Tell the SuperLink that it may forget the message."""
        call = make_confirm_message_received_fn_protobuf(
            lambda r: self._call(self._client.ConfirmMessageReceived, r), self._node, arrived.run
        )
        call(arrived.id)

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply, for which the client worked so long."""
        run = reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            head = remove_content_from_message(reply) if reply.has_content() else reply
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(head)],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            response = self._call(self._client.PushMessages, request)
            wanted = set(response.objects_to_push)
            push = make_push_object_fn_protobuf(
                lambda r: self._call(self._client.PushObject, r), self._node, run, response.session_id
            )
            pieces = ((key, piece.deflate()) for key, piece in objects.items() if key in wanted)
            push_object_contents_from_iterable(pieces, push)

    def _enter(self) -> None:
        if self._own_keys:
            try:
                self._once(self._client.RegisterNode, RegisterNodeFleetRequest(public_key=self._public))
            except Refused as error:
                if error.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                    raise
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        self._node = Node(node_id=self._once(self._client.ActivateNode, request).node_id)

    def _known(self) -> bool:
        """Whether the SuperLink knows this node; if so, it counts on it again."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            return bool(self._once(self._client.SendNodeHeartbeat, request).success)
        except Refused:
            return False

    def _beat(self) -> bool:
        """A heartbeat; False if it did not get through."""
        try:
            if not self._known():
                self._forgotten.set()
        except (Lost, NotRunning, FedveilError):  # the thread that asks for messages says so
            return False
        return True

    def _poll(self) -> Any:
        """The SuperLink's messages for this node, or None if it does not know it."""
        try:
            return self._once(self._client.PullMessages, PullMessagesRequest(node=self._node))
        except Refused as error:
            if error.code == httpx.codes.UNAUTHORIZED:
                return None
            raise Lost(f"it answers {error}") from error

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        return self._patience(lambda: self._once(method, request))

    def _once(self, method: Callable[[Any], Any], request: Any) -> Any:
        """One call; what can go wrong in it has one of four names."""
        try:
            return method(request)
        except httpx.HTTPStatusError as error:
            raise _refusal(error.response) from error
        except httpx.RequestError as error:
            if (why := _distrusted(error)) is not None:
                fix = "--root-certificates with the certificate of the CA that signed the SuperLink's"
                raise FedveilError(self._where, f"its certificate is not to be trusted: {clean(why)}", fix) from error
            raise Lost(str(error) or type(error).__name__) from error
        except ValueError as error:  # no protobuf
            raise Refused(0, clean(error)) from error

    def _explained(self, error: Refused) -> FedveilError:
        if error.code == ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED:
            what, fix = "lets in registered keys only", "--auth-supernode-private-key FILE"
        elif error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            what = "refuses this node's key: it is not registered, or another node uses it"
            fix = "flwr supernode register KEY.pub"
        elif error.code == httpx.codes.UNAUTHORIZED:
            what, fix = (
                "refuses this node's signature",
                "set the clocks: it holds the time, and five minutes are too much",
            )
        else:
            what, fix = f"refuses this node: {clean(error)}", "the address of the Fleet API of a SuperLink"
        return FedveilError(self._where, what, fix)


def _address(superlink: str) -> str:
    found = parse_address(superlink)
    if not found or not found[0]:
        raise BadArgument("--superlink", f"{superlink!r} is no address", "host:port, without https://")
    host, port, six = found
    return f"[{host}]:{port}" if six else f"{host}:{port}"


def _refusal(response: httpx.Response) -> Exception:
    if response.status_code in AWAY:
        return Lost(f"it answers {response.status_code}")
    said = FlowerError.from_json(response.text)
    if response.status_code == httpx.codes.FORBIDDEN:
        return NotRunning(clean(said.message if said else response.reason_phrase))
    return Refused(said.code if said else response.status_code, clean(said.message if said else response.reason_phrase))


def _distrusted(error: BaseException | None) -> str | None:
    """Why a certificate was not accepted, if that is what went wrong. A proxy that hangs up is another SSL error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None
