"""What a node that stays does by itself: versions, apps, errors, contexts, lost connections, flags. No processes."""

import logging
import socket
import ssl
import sys
import threading
import zipfile
from dataclasses import fields
from io import BytesIO

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

import httpx
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.supercore.constant import SUPERLINK_DEFAULT_CLIENT_ADDRESS
from flwr.supercore.run import Run
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from tests.flower.grid import LocalGrid, over_the_wire
from tests.flower.test_flower_proxy import proxy

from fedveil.cli import main
from fedveil.cli.flower import flower_node
from fedveil.errors import BadArgument, FedveilError, StaleUpdate
from fedveil.flower import fleet, node
from fedveil.flower.carry import wrap
from fedveil.flower.engine import push
from fedveil.flower.fleet import Arrived, Fleet, NotRunning, RunSettings
from fedveil.flower.node import Memory, NodeSettings, check_version, error_text, handle, load_app, poll_pause
from fedveil.flower.patience import LONGEST_PAUSE, Lost, Patience, Stopped, clean, pauses

RECORD = "patient 4711, HIV positive"


def test_another_flower_is_refused():
    check_version()
    with pytest.raises(FedveilError, match=r"tested with Flower 1\.41\.0, and 1\.42\.0 is installed") as caught:
        check_version("1.42.0")
    assert "pip install flwr==1.41.0" in str(caught.value)


def write_app(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("spec", "text", "what"),
    [
        ("no_such_module_here:app", None, "cannot import no_such_module_here"),
        ("nameless", None, "a ClientApp is named as package.module:name"),
        ("app_without:app", "", "module app_without has no 'app'"),
        ("app_of_text:app", "app = 'text'", "is a str, not a flwr.clientapp.ClientApp"),
        ("app_that_raises:app", "1 / 0", "its import raises ZeroDivisionError"),
    ],
)
def test_an_app_that_does_not_load_is_refused_with_the_reason(spec, text, what, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.path", ["", *sys.path])
    if text is not None:
        write_app(tmp_path, spec.partition(":")[0], text)
    with pytest.raises(BadArgument, match=what):
        load_app(spec, tmp_path)
    assert main(["flower-node", spec, "--app-dir", str(tmp_path), "--insecure"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert what in captured.err
    assert "Traceback" not in captured.err


def test_an_app_is_found_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    write_app(tmp_path, "app_in_a_folder", "from flwr.clientapp import ClientApp\napp = ClientApp()")
    assert isinstance(load_app("app_in_a_folder:app", tmp_path), ClientApp)
    with pytest.raises(BadArgument, match="there is no folder"):
        load_app("app_in_a_folder:app", tmp_path / "none")


class OwnError(FedveilError):
    """An error of an app, whose text may hold anything."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(RECORD), "ValueError"),
        (KeyError(RECORD), "KeyError"),
        (SystemExit(RECORD), "SystemExit"),
        (OwnError("data", RECORD), "OwnError"),
        (StaleUpdate("this node", "the message is of round 3"), "this node: the message is of round 3."),
    ],
)
def test_an_error_goes_to_the_server_without_what_records_may_be_in_it(error, text):
    assert error_text(error) == text


class Sent:
    """A SuperLink with one message in place of a network."""

    node = 100

    def __init__(self, message, pull=None, send=None):
        self.message, self.replies, self.asked = message, [], 0
        self._pull, self._send = pull, send

    def settings(self, run):
        self.asked += 1
        return RunSettings({"lr": 0.5}, series=7)

    def pull(self, arrived):
        if self._pull:
            raise self._pull
        return over_the_wire(self.message)

    def confirm(self, arrived):
        pass

    def send(self, reply, seconds):
        if self._send:
            raise self._send
        self.replies.append(over_the_wire(reply_with_id(reply)))


def reply_with_id(reply):
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def message_of_a_round():
    """A message as the grid of a server sends it."""
    grid = LocalGrid(ClientApp(), 1)
    push(grid, wrap(b"ask"), [100], "3", 60.0)
    return grid.sent[0]


def answering(does):
    app = ClientApp()

    @app.train()
    def train(message, context):
        return does(message, context)

    return app


def echo(message, context):
    context.state["seen"] = message.content["fedveil"]
    return Message(content=message.content, reply_to=message)


def arrived(message):
    return Arrived(message, None)


def raising(error):
    def does(message, context):
        raise error

    return does


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, logger="fedveil")
    return caplog


def test_what_an_app_raises_is_in_the_nodes_log_only(heard):
    message = message_of_a_round()
    sent = Sent(message)
    handle(arrived(message), answering(raising(ValueError(RECORD))), sent, Memory(), {})
    (reply,) = sent.replies
    assert (reply.error.code, reply.error.reason) == (2, "ValueError")
    assert RECORD in heard.text
    assert "run 1, round 3: answered with an error" in heard.text


def test_an_app_that_calls_exit_or_returns_nothing_does_not_end_the_node():
    message = message_of_a_round()
    for does, name in ((raising(SystemExit(3)), "SystemExit"), (lambda m, c: None, "TypeError")):
        sent = Sent(message)
        handle(arrived(message), answering(does), sent, Memory(), {})
        assert sent.replies[0].error.reason == name


def test_a_message_is_answered_once_and_its_run_has_one_context(heard):
    message, memory = message_of_a_round(), Memory()
    sent = Sent(message)
    for _ in range(2):
        handle(arrived(message), answering(echo), sent, memory, {"partition-id": 4})
    assert len(sent.replies) == 1
    assert "ignored, it was answered before" in heard.text
    other = message_of_a_round()
    other.metadata.__dict__["_message_id"] = "another"
    handle(arrived(other), answering(echo), sent, memory, {})
    (context,) = memory.contexts.values()
    assert [reply.has_error() for reply in sent.replies] == [False, False]
    assert sent.asked == 1
    assert (context.node_config, context.run_config) == ({"partition-id": 4}, {"lr": 0.5})
    assert "seen" in context.state


def test_a_message_that_cannot_be_read_is_answered_with_an_error(heard):
    message = message_of_a_round()
    sent = Sent(message, pull=KeyError("no such object"))
    handle(arrived(message), answering(echo), sent, Memory(), {})
    assert sent.replies[0].error.reason == "the message cannot be read"
    assert "cannot be read (KeyError" in heard.text


@pytest.mark.parametrize("place", ["pull", "send"])
def test_a_run_that_has_ended_is_one_line(place, heard):
    message = message_of_a_round()
    sent = Sent(message, **{place: NotRunning("finished")})
    handle(arrived(message), answering(echo), sent, Memory(), {})
    assert sent.replies == []
    assert "not answered, the run has ended" in heard.text
    assert "Traceback" not in heard.text


def test_an_answer_that_cannot_be_sent_does_not_end_the_node(heard):
    message = message_of_a_round()
    handle(arrived(message), answering(echo), Sent(message, send=fleet.Refused(500, "no\nroom")), Memory(), {})
    assert "not answered (Refused: no room (code 500))" in heard.text


def test_contexts_of_runs_long_gone_are_forgotten_and_a_series_shares_its_state():
    memory = Memory()
    first = memory.begin(0, 100, {}, RunSettings({}, series=5))
    assert memory.begin(1, 100, {}, RunSettings({}, series=5)).state is first.state
    assert memory.begin(2, 100, {}, RunSettings({}, series=6)).state is not first.state
    assert (
        memory.begin(3, 100, {}, RunSettings({}, series=0)).state
        is not memory.begin(4, 100, {}, RunSettings({}, series=0)).state
    )
    for run in range(5, node.MOST_RUNS):
        memory.begin(run, 100, {}, RunSettings({}, series=run))
    assert memory.context(0) is first  # and is younger than run 1 now
    memory.begin(99, 100, {}, RunSettings({}, series=99))
    assert len(memory.contexts) == node.MOST_RUNS
    assert memory.context(1) is None
    assert memory.context(0) is first


def test_pauses_grow_to_a_bound():
    found = [pause for pause, _ in zip(pauses(), range(12), strict=False)]
    assert 0.25 <= found[0] <= 0.5
    assert found[4] > found[0]
    assert LONGEST_PAUSE / 2 <= found[-1] <= LONGEST_PAUSE
    assert poll_pause(1.0, 0.3) == 0.3
    assert poll_pause(20.0, 0.3) == 1.0
    assert poll_pause(1e6, 0.3) == 3.0
    assert poll_pause(1e6, 5.0) == 5.0


def failing(times, error=None):
    count = iter(range(times))

    def attempt():
        if next(count, None) is not None:
            raise error or Lost("connection\nrefused")
        return "found"

    return attempt


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr("fedveil.flower.patience.pauses", lambda: iter(lambda: 0.0, None))


def test_a_lost_connection_is_two_lines_however_many_tries_it_takes(at_once, heard):
    patience = Patience("lab:8000")
    assert patience(failing(50)) == "found"
    assert patience(failing(0)) == "found"
    lines = [record.getMessage() for record in heard.records]
    assert lines == ["no connection to lab:8000 (connection refused); trying again", lines[1]]
    assert lines[1].startswith("connection to lab:8000 is back after")


def test_patience_ends_where_it_was_told_and_other_errors_pass(at_once):
    assert Patience("lab:8000", max_retries=3)(failing(3)) == "found"
    with pytest.raises(FedveilError, match=r"lab:8000: cannot be reached after 4 tries .*connection refused"):
        Patience("lab:8000", max_retries=3)(failing(4))
    with pytest.raises(FedveilError, match="cannot be reached after 1 tries"):
        Patience("lab:8000", max_wait_time=0.0)(failing(1))
    with pytest.raises(KeyError):
        Patience("lab:8000")(failing(1, KeyError()))


def test_a_node_that_ends_waits_no_longer():
    patience = Patience("lab:8000")
    timer = threading.Timer(0.1, patience.stop)
    timer.start()
    with pytest.raises(Stopped):
        patience(failing(10**9))
    timer.join()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_proxy_that_hangs_up_is_no_wrong_certificate():
    with proxy(closed_port()) as port:
        for insecure in (False, True):
            patience = Patience("proxy", max_retries=1)
            connection = Fleet(
                f"127.0.0.1:{port}", insecure=insecure, root_certificates=None, keys=None, patience=patience
            )
            with pytest.raises(FedveilError, match="cannot be reached after 2 tries"):
                connection.join()
            connection.leave()


def test_a_certificate_that_is_not_to_be_trusted_is_told_from_other_ssl_errors():
    def caught(cause):
        try:
            raise httpx.ConnectError("x") from cause
        except httpx.ConnectError as error:
            return fleet._distrusted(error)

    assert caught(ssl.SSLCertVerificationError("self-signed")) is not None
    assert caught(ssl.SSLEOFError("EOF occurred in violation of protocol")) is None
    assert caught(ConnectionRefusedError()) is None


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, "", Lost),
        (403, '{"code": 2007, "detail": "finished"}', NotRunning),
        (412, '{"code": 2004, "detail": "no"}', fleet.Refused),
        (401, '{"detail": "Invalid SuperNode authentication"}', fleet.Refused),
        (500, "<html>", fleet.Refused),
    ],
)
def test_an_answer_of_the_superlink_has_one_meaning(status, body, kind):
    found = fleet._refusal(httpx.Response(status, text=body))
    assert type(found) is kind
    if isinstance(found, fleet.Refused):
        assert found.code == (2004 if status == 412 else status)


def fab(**files):
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name.replace("_toml", ".toml").replace("_py", ".py"), text)
    return buffer.getvalue()


PROJECT = """
[project]
name = "spy"
version = "1.0.0"
license = { text = "x" }
[tool.flwr.app]
publisher = "x"
[tool.flwr.app.components]
serverapp = "spy_module:app"
clientapp = "spy_module:app"
[tool.flwr.app.config]
lr = 0.1
rounds = 3
"""


def test_of_a_fab_only_the_configuration_is_read(tmp_path):
    content = fab(pyproject_toml=PROJECT, spy_module_py=f"open({str(tmp_path / 'spied')!r}, 'w')")
    run = Run.create_empty(1)
    run.override_config = {"lr": 0.5}
    assert fleet.settings_of(content, run) == {"lr": 0.5, "rounds": 3}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="too large"):
        fleet.settings_of(fab(pyproject_toml=PROJECT + "#" * 2**21), run)


def test_keys_and_settings_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="holds no elliptic-curve private key"):
        fleet.read_key(b"nothing", "node0")
    assert fleet.node_settings("partition-id=0 cache='here'") == {"partition-id": 0, "cache": "here"}
    assert fleet.node_settings("") == {}
    for words in ("partition-id", "partition-id=[0"):
        with pytest.raises(BadArgument, match="--node-config"):
            fleet.node_settings(words)
    with pytest.raises(BadArgument, match=r"--insecure: --root-certificates needs TLS"):
        NodeSettings(insecure=True, root_certificates=tmp_path)
    for address in ("https://lab:8000", "lab", ":8000"):
        with pytest.raises(BadArgument, match="is no address"):
            fleet._address(address)
    assert fleet._address("[::1]:8000") == "[::1]:8000"
    with pytest.raises(BadArgument, match="it holds no PEM certificates"):
        Fleet("lab:8000", insecure=False, root_certificates=b"no", keys=None, patience=Patience("lab"))


def test_flags_are_those_of_flower_supernode():
    ours = {field.name for field in fields(NodeSettings)}
    theirs = {action.dest: action.default for action in _parse_args_run_supernode()._actions}
    assert ours - theirs.keys() == {"poll_interval"}
    assert ours < set(flower_node.__annotations__)
    assert NodeSettings().superlink == theirs["superlink"] == SUPERLINK_DEFAULT_CLIENT_ADDRESS


def test_a_superlink_that_is_not_there_ends_a_node_that_was_told_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.path", list(sys.path))
    write_app(tmp_path, "app_without_a_link", "from flwr.clientapp import ClientApp\napp = ClientApp()")
    words = ["app_without_a_link:app", "--app-dir", str(tmp_path), "--insecure", "--max-retries", "1"]
    assert main(["flower-node", *words, "--superlink", f"127.0.0.1:{closed_port()}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("no connection to 127.0.0.1:") == 1
    assert "cannot be reached after 2 tries" in captured.err


def test_text_from_elsewhere_is_one_line():
    assert clean("a\nb\x1b[2J" + "x" * 1000).startswith("a b [2Jxxx")
    assert len(clean("x" * 1000)) == 200
