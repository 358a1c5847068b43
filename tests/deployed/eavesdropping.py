"""A proxy that keeps what goes to clients, and what must not be in it."""

import contextlib
import json
import socket
import struct
import threading

from tests.deployed.results import MLP
from tests.deployed.serving import adam
from tests.deployed.task import make_model, parts

from fedveil import Broadcast, client_view
from fedveil.data import load
from fedveil.defences import Veil
from fedveil.federation import Federation
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.protocol import Request, read

BEFORE, ROUNDS = 200, 3


class Ear:
    """A proxy that keeps every byte that goes to a client."""

    def __init__(self, port):
        self.connections, self.target, self.lines = [], port, []
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        self.threads = [threading.Thread(target=self._open)]
        self.threads[0].start()

    def _open(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.door.accept()
                self.lines.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except ConnectionRefusedError:
                    hang_up(near)
                    continue
                self.lines.append(far)
                for one, other, keep in ((near, far, False), (far, near, True)):
                    self.threads.append(threading.Thread(target=self._carry, args=(one, other, keep)))
                    self.threads[-1].start()

    def _carry(self, one, other, keep):
        heard = bytearray()
        if keep:
            self.connections.append(heard)
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if keep:
                    heard += data
                other.sendall(data)
        hang_up(one, other)

    @property
    def heard(self):
        """Every connection's bytes, one connection behind the other."""
        return b"\n".join(self.connections)

    def close(self):
        hang_up(self.door, *self.lines)
        [thread.join(10) for thread in self.threads]
        [line.close() for line in (self.door, *self.lines)]


def hang_up(*lines):
    for line in lines:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


def frames(heard):
    """How many values the search may miss: each of HTTP/2's frames ends in the middle of one value at most."""
    return len(heard) // 2**14 + 1


def listen(run, home, ears):
    """Let a trained server go on for a few veiled rounds and a few plain ones, and look at what clients heard.

    Args:
        run: starts the test app in a folder with a configuration, and waits for its end.
        home: a folder for all of it.
        ears: of the clients.
    """
    heard = {}
    for defence in ("veil", "plain"):
        out, captured, secrets = home / f"{defence}-out", home / f"{defence}-captured", home / f"{defence}-secrets"
        captured.mkdir()
        trained = Federation(
            make_model(MLP),
            parts(),
            Veil(groups=3, additive=100.0) if defence == "veil" else "plain",
            adam,
            loss="squared_error",
            batch_size=32,
            whole_shard=True,
        )
        trained.fit(rounds=BEFORE)
        trained.save(out)  # the server goes on from here
        starts = [len(ear.heard) for ear in ears]
        run(out, rounds=BEFORE + ROUNDS, defence=defence, secrets=str(secrets), capture=str(captured))
        heard[defence] = [ear.heard[start:] for ear, start in zip(ears, starts, strict=True)]
        assert len(list(captured.glob("*.ask"))) == ROUNDS * len(ears)
    lines = [json.loads(line) for line in (home / "veil-secrets").read_text().splitlines()]
    assert len(lines) == ROUNDS
    parameters = [float(x) for p in trained.model.parameters() for x in p.detach().flatten()[:20]]
    for veiled, plain in zip(heard["veil"], heard["plain"], strict=True):
        for line in lines:
            assert len(line["secret"]) > 90
            assert sum(struct.pack("<d", x) not in veiled for x in line["public"]) <= frames(veiled)
            assert not any(holds(veiled, x) for x in line["secret"])
        assert sum(not holds(plain, x) for x in parameters) <= frames(plain) < len(parameters) / 4
        assert not any(holds(veiled, x) for x in veiled_parameters(home / "veil-out"))
    test = load("digits").test
    inputs = test.inputs.double()
    assert metrics(predict(trained.model, inputs), test.targets)["accuracy"] > 0.7
    for file in (home / "veil-captured").glob("*.ask"):
        ask = read(file.read_bytes(), Request)
        view = client_view(make_model(MLP), Broadcast.unpack(ask.values, ask.tensors, ask.loss))
        assert metrics(predict(view, inputs), test.targets)["accuracy"] < 0.3


def holds(heard, number):
    """Whether bytes hold a number, in either order or as text."""
    return any(struct.pack(order, number) in heard for order in ("<d", ">d")) or repr(number).encode() in heard


def veiled_parameters(out):
    """Some of the true parameters after the last round, which no broadcast holds, and of those before it."""
    from fedveil.federation import checkpoint

    found = []
    for name in (checkpoint.LAST, checkpoint.PREVIOUS):
        _, state = checkpoint.read(out / name, "cpu")
        found += [float(x) for p in state["model"].values() for x in p.flatten()[:20]]
    return found
