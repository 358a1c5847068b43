"""What a server may set of a client's defence and loss, and what stays the client's."""

import math
import sys

import numpy as np
import pytest
import torch
from tests.asks import ask_of, changed, faults, unpacked

from fedveil.defences import registry
from fedveil.errors import BadArgument
from fedveil.federation.protocol import Answer, read

SETTINGS = {
    "plain": [{"rounding": 1}, {"seed": 1}, {"x": None}],
    "veil": [{"groups": 1}, {"entropy": None}, {"keep_noise": True}, {"seed": 1}],
    "dbcl": [{"seed": 1}, {"q": 2}, {"skip": []}],
    "ppdl": [
        {"seed": 1},
        {"seed": None},
        {"name": "x"},
        *[{"sigma": bad} for bad in (-1, "1", True, None, [1], math.nan, math.inf, 1e200, 10**30, {})],
        *[{"fraction": bad} for bad in (0, 1.5, "1", True, None, [0.5], math.nan)],
        *[{"clip": bad} for bad in (0, -1.0, "mean", "x" * 5000, True, [1], math.inf, 1e200)],
    ],
    "spn": [
        {"seed": 1},
        *[{"bits": bad} for bad in (0, -1, 1025, 10**9, 1.5, True, None, "8")],
        *[{name: bad} for name in ("weight", "margin", "lr") for bad in (-1, "1", True, None, math.nan, 1e200)],
    ],
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_server_sets_what_a_defence_lets_it_set_and_nothing_absurd(kind):
    message, client = ask_of(kind)
    own = unpacked(message)[0]["settings"]
    assert faults(client, {str(change): changed(message, settings=own | change) for change in SETTINGS[kind]}) == {}


def test_a_server_cannot_choose_the_seed_of_a_clients_noise():
    message, client = ask_of("ppdl")
    for kind in ("ppdl", "spn", "dbcl"):
        with pytest.raises(BadArgument, match=f"ask: a server cannot set 'seed' of {kind}"):
            client.check(changed(message, defence=kind, settings={"seed": 7}))


OWN = """
from fedveil.defences.plain import Plain, PlainClient
from fedveil.defences.registry import Record


class HalvedClient(PlainClient):
    def __init__(self, factor, model, loss):
        super().__init__(model, loss)
        self.factor = factor

    def upload(self, update, client=0):
        for gradient in update.gradients.values():
            gradient.mul_(self.factor)
        return update


class Halved(Plain):
    remote_settings = ("factor", "table", "seed")

    def __init__(self, factor=0.5, table=None, seed=None, secret=None):
        super().__init__()
        self.name, self.factor, self.table = "halved", {"half": 0.5}.get(factor, factor), table
        self.seed, self.repeatable = seed, seed is not None
        if isinstance(factor, str) and factor != "half":
            raise KeyError(factor)

    def client(self, model, example, loss):
        return HalvedClient(self.factor, model, loss)


RECORD = Record("any", "halved", "own_halved:Halved")
"""


@pytest.fixture
def halved(tmp_path, monkeypatch):
    """A defence of another package, by its entry point."""
    (tmp_path / "own_halved.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    monkeypatch.setattr(registry, "list_installed", lambda group: {"halved": "own_halved:RECORD"})
    yield
    sys.modules.pop("own_halved", None)


@pytest.mark.usefixtures("halved")
def test_defences_of_other_packages_are_built_by_the_same_rule():
    message, client = ask_of("plain")
    plain = read(client.reply(message), Answer).tensors
    for settings in ({}, {"factor": 0.5}, {"factor": "half", "table": [1, 2.5, "a", None], "seed": None}):
        found = read(client.reply(changed(message, defence="halved", settings=settings)), Answer).tensors
        assert all(torch.equal(found[name], own / 2) for name, own in plain.items() if name.startswith("gradient/"))
    refused = {
        "a server cannot set 'secret' of halved": {"secret": 1},
        "halved with a seed is for tests": {"seed": 1},
        "halved cannot be built with the server's settings: KeyError": {"factor": "third"},
        "halved cannot be built with the server's settings: TypeError": {"factor": [1]},
        "table of halved is neither a number nor a short text": {"table": {"a": 1}},
        "factor of halved is neither a number nor a short text": {"factor": "x" * 5000},
    }
    for text, settings in refused.items():
        with pytest.raises(BadArgument, match=text):
            client.check(changed(message, defence="halved", settings=settings))


LOSSES = [
    ("squared_error", {"delta": 1.0}),
    ("huber", {"weight": None}),
    *[("huber", {"delta": bad}) for bad in (0, -1, "1", True, None, [1], math.nan, math.inf, 1e200, 10**30, {})],
    *[("cross_entropy", {"label_smoothing": bad}) for bad in (1, -0.1, "0", False, None, [0.1], math.nan)],
    *[("cross_entropy", {"weight": bad}) for bad in (1, "1111", ["1"] * 4, [True] * 4, [[1]] * 4, [-1] * 4, {})],
    *[("cross_entropy", {"weight": [bad] * 4}) for bad in (math.nan, math.inf, 1e200, None, 10**30)],
    ("cross_entropy", {"function": "print"}),
]


def test_a_loss_takes_the_settings_that_it_has_and_finite_numbers():
    message, client = ask_of("plain")
    asks = {str(own): changed(message, loss=own[0], loss_settings=own[1]) for own in LOSSES}
    assert faults(client, asks) == {}


def test_a_refusal_of_records_says_nothing_of_them(capsys):
    message, client = ask_of("plain")
    client.records = np.array([["John Smith", 1]], dtype=object), client.records[1][:1]
    with pytest.raises(BadArgument, match="its records cannot be used; its own log says why") as caught:
        client.reply(message)
    assert "John" not in str(caught.value)
    assert "John Smith" in capsys.readouterr().err
