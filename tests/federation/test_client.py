"""Whatever a server sends, a client refuses it by name before it computes, or answers within bounds."""

import json
import math
import random
import resource
import tracemalloc

import numpy as np
import pytest
import torch
from tests.asks import KINDS, Client, ask_of, changed, faults, mutated, packed, unpacked
from tests.oracle import Network
from torch import nn

from fedveil.defences import Plain, Veil, registry
from fedveil.defences.plain import PlainClient
from fedveil.errors import BadArgument, FedveilError, ModelMismatch
from fedveil.federation.protocol import Answer, read
from fedveil.models import mlp

MOST_MEMORY = 2**27  # bytes by which a process may grow while it refuses asks of a few kilobytes


def peak():
    """The most bytes that this process has held so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_asks_are_refused_or_answered_within_bounds(kind, count):
    count = min(count, 500) if kind == "spn" else count
    message, client = ask_of(kind)
    client.reply(message)
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    held, answered = peak(), 0
    for number in range(count):
        bad = mutated(message, random.Random(f"{kind} {number}"))
        try:
            found = client.reply(bad)
        except FedveilError:
            continue
        answered += 1
        assert len(found) <= client.most(), number
    assert all(torch.equal(tensor, before[name]) for name, tensor in client.model.state_dict().items())
    assert peak() - held <= MOST_MEMORY
    assert 0 < answered < count / 2


def with_candidates(message, count):
    groups = len(unpacked(message)[1]["head/offset"])
    return changed(message, {"head/candidates": torch.zeros(count, groups).double()})


def with_tensors(message, count):
    """An ask with that many empty tensors, written by hand: safetensors would take long."""
    values = json.dumps({"format": 2, "kind": "request", "values": unpacked(message)[0]})
    form = '"parameter/%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    entries = ",".join([form % number for number in range(count)])
    return bare(f'{{"__metadata__":{{"fedveil":{json.dumps(values)}}},{entries}}}')


def bare(head, size=None):
    """A message without tensors, with any head, which may claim another size."""
    data = head.encode()
    return (len(data) if size is None else size).to_bytes(8, "little") + data


def nested(depth, outside):
    """JSON that is nested deeply, as the head itself or as the values inside it."""
    text = "[" * depth
    return bare(text if outside else json.dumps({"__metadata__": {"fedveil": text}}))


ATTACKS = {
    "candidates": [lambda ask: with_candidates(ask, 10**5), lambda ask: with_candidates(ask, 10**6)],
    "empty tensors": [lambda ask: with_tensors(ask, 20_000), lambda ask: with_tensors(ask, 500_000)],
    "deep and wide JSON": [
        lambda ask: nested(10**6, outside=True),
        lambda ask: nested(10**6, outside=False),
        lambda ask: nested(10**4, outside=False),
        lambda ask: changed(ask, junk=[[]] * 10**6),
        lambda ask: bare("[" + "{}," * 10**6 + "0]", size=2**40),
    ],
    "long texts and lists": [
        lambda ask: changed(ask, trainable=["x" * 10**6]),
        lambda ask: changed(ask, training=["x"] * 10**5),
        lambda ask: changed(ask, loss_settings={"weight": [1] * 10**6}),
    ],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_asks_that_would_cost_a_client_dear_are_refused_before_any_work(name):
    message, client = ask_of("veil, decoys")
    for attack in ATTACKS[name]:
        hostile, held = attack(message), peak()
        assert faults(client, {name: hostile}) == {}
        assert peak() - held <= MOST_MEMORY  # tensors, which tracemalloc does not see
        tracemalloc.start()
        try:
            assert faults(client, {name: hostile}) == {}
            assert tracemalloc.get_traced_memory()[1] <= 2**22 + 4 * len(hostile)
        finally:
            tracemalloc.stop()


def test_a_client_computes_for_64_groups_or_decoys_and_no_more(monkeypatch):
    wide = lambda: mlp(6, 70, hidden=10)  # noqa: E731
    monkeypatch.setitem(KINDS, "groups", (lambda: Veil(64), wide, "squared_error"))
    monkeypatch.setitem(KINDS, "decoys", (lambda: Veil(decoys=64), wide, "cross_entropy"))
    message, client = ask_of("groups")
    answer = client.reply(message)
    assert {len(own) for name, own in read(answer, Answer).tensors.items() if name.startswith("passes/")} == {66}
    more = {"head/offset": torch.ones(65).double(), "head/candidates": torch.zeros(0, 65).double()}
    with pytest.raises(BadArgument, match=r"65 groups .* more than clients accept.\n  Fix: use at most 64 groups"):
        client.check(changed(message, more))
    with pytest.raises(BadArgument, match="Veil: groups must be an integer from 1 to 64, got 65"):
        Veil(65)
    message, client = ask_of("decoys")
    assert max(len(client.reply(message)), len(answer)) <= client.most()
    with pytest.raises(BadArgument, match="66 candidates, more than clients accept"):
        client.check(with_candidates(message, 66))


HEADS = {
    "no candidates": {"head/candidates": torch.zeros(0, 1).double()},
    "candidates of other groups": {"head/candidates": torch.zeros(3, 2).double()},
    "candidates in float32": {"head/candidates": torch.zeros(3, 1)},
    "no groups": {"head/offset": torch.zeros(0).double(), "head/candidates": torch.zeros(3, 0).double()},
    "more groups than outputs": {"head/offset": torch.ones(5).double(), "head/candidates": torch.ones(3, 5).double()},
    "a group that is not there": {"head/partition": torch.tensor([0, 0, 1, 0])},
    "a negative group": {"head/partition": torch.tensor([0, 0, -1, 0])},
    "a partition of 3": {"head/partition": torch.zeros(3).long()},
    "a direction of 5": {"head/direction": torch.ones(5)},
    "a direction in float64": {"head/direction": torch.ones(4).double()},
    "no offset": {"head/offset": None},
}


def change_head(message):
    head = unpacked(message)[0]["values"]["head"]
    parts = {
        "weight": ["no.weight", "0.bias", "0.weight", None],
        "bias": ["no.bias", "0.bias", "", 1],
        "dim": [2, -1, None, True],
        "axis": [-3, 0, 99, 10**30],
        "tail": ["odd", "", None],
        "noisy_bias": [1, None],
        "path": [None, "x" * 2000],
    }
    asks = {(name, bad): changed(message, head=head | {name: bad}) for name, own in parts.items() for bad in own}
    return asks | {name: changed(message, head={key: head[key] for key in head if key != name}) for name in head}


def change_values(message, choices):
    return {(name, str(bad)): changed(message, **{name: bad}) for name, own in choices.items() for bad in own}


NAMES = {
    "trainable": [[], ["0.weight"] * 2, ["0.weight", "nobody"], ["x" * 2000], [""], None],
    "training": [["", "nobody"], ["", "", "0", "1", "2", "3"], ["x" * 2000], None],
}
WEIGHT, MEAN, COUNT = "parameter/0.weight", "buffer/1.running_mean", "buffer/1.num_batches_tracked"
TENSORS = [
    *[{WEIGHT: torch.zeros(10, 6).to(dtype)} for dtype in (torch.float64, torch.float16, torch.int64)],
    {WEIGHT: torch.zeros(10, 6).to(torch.float8_e4m3fn)},
    {WEIGHT: torch.zeros(6, 10)},
    {WEIGHT: torch.zeros(0)},
    {"parameter/nobody": torch.zeros(3)},
    {"buffer/0.weight": torch.zeros(10, 6)},
    {MEAN: torch.zeros(10).long()},
    {MEAN: None},
    *[{COUNT: torch.zeros((), dtype=dtype)} for dtype in (torch.float32, torch.int32, torch.bool)],
    {COUNT: torch.zeros(2).long()},
]
FIELDS = {
    "round": [-1, 2**53, True, 1.5, "1", None],
    "batch_size": [0, -1, 2**53, True, 1.5, "1", None],
    "seed": [-1, 2**64, 10**30, True, 1.5, "1", None],
    "session": [1, None, "x" * 2000, "\ud800", "\n"],
    "token": [1, None, "x" * 2000, "\ud800"],
    "defence": [1, None, "x" * 2000, "veils", "os:system"],
    "loss": [1, None, "x" * 2000, "own"],
    "whole_shard": [1, None],
    "values": [[], None, {}],
    "settings": [[], None],
    "loss_settings": [[], None],
    "secure": [[], None],
}


def leave_out(message):
    values, tensors = unpacked(message)
    asks = {name: packed({key: value for key, value in values.items() if key != name}, tensors) for name in values}
    return asks | {"tensors": packed(values, {})}


REFUSED = {  # the kinds of asks, and what is changed
    "numbers of the head": (["veil, decoys"], lambda ask: {name: changed(ask, own) for name, own in HEADS.items()}),
    "a head that is not one of the model": (["veil, decoys"], change_head),
    "names that the model does not have": (["plain", "veil", "dbcl"], lambda ask: change_values(ask, NAMES)),
    "names, shapes and dtypes": (
        ["plain", "veil", "ppdl"],
        lambda ask: {str(own): changed(ask, own) for own in TENSORS},
    ),
    "types and bounds": (["plain"], lambda ask: change_values(ask, FIELDS)),
    "missing values": (["plain"], leave_out),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (kinds, _) in REFUSED.items() for kind in kinds])
def test_an_ask_that_does_not_fit_the_clients_model_is_refused(name, kind):
    message, client = ask_of(kind)
    assert faults(client, REFUSED[name][1](message)) == {}


class Mixed(nn.Module):
    """Hundreds of parameters, in three dtypes, with a counter."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(6, 10).bfloat16()
        self.large = nn.Linear(10, 4).double()
        self.scales = nn.ParameterList(torch.ones(()) for _ in range(300))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        hidden = self.small(x.to(self.small.weight.dtype)).relu()
        return self.large(hidden.to(self.large.weight.dtype)) * sum(self.scales)


def mixed_ask(model):
    message = ask_of("plain")[0]
    values = unpacked(message)[0]
    names = dict(model.named_parameters())
    values["values"] = {"trainable": list(names), "training": [path for path, _ in model.named_modules()]}
    tensors = {f"parameter/{name}": own.detach() for name, own in names.items()}
    return packed(values, tensors | {"buffer/count": model.count})


def test_a_model_of_several_dtypes_travels_and_its_dtypes_are_not_exchanged():
    client = Client(nn.Identity)
    client.model = Mixed()
    found = read(client.reply(mixed_ask(client.model)), Answer).tensors
    assert found["gradient/small.weight"].dtype == torch.bfloat16
    assert found["gradient/large.weight"].dtype == torch.float64
    for dtype in (torch.float32, torch.float64):
        assert client.reply(mixed_ask(Mixed().to(dtype)))
    other = Mixed()
    other.small, other.large = other.small.double(), other.large.bfloat16()
    with pytest.raises(
        ModelMismatch, match=r"the broadcast has dtype torch\.(bfloat16|float64), but the model has torch\."
    ):
        client.check(mixed_ask(other))


def test_a_parameter_that_did_not_travel_is_not_the_clients_own():
    message, first = ask_of("veil, stacked")
    second = Client(KINDS["veil, stacked"][1])
    for parameter in second.model.parameters():
        parameter.data.add_(1.0)
    hidden = changed(message, {"parameter/body.0.bias": None}, trainable=["body.0.weight", "head.weight", "head.bias"])
    answers = [read(client.reply(hidden), Answer).tensors for client in (first, second)]
    assert all(torch.equal(own, answers[1][name]) for name, own in answers[0].items())


def cut():
    """A model that returns as many rows as it was given, however many its head has made."""
    return Network(lambda own, x: torch.tanh(own.head(x))[: len(x)], head=nn.Linear(6, 4))


def test_memory_that_no_candidate_has_filled_is_not_sent(monkeypatch):
    monkeypatch.setitem(KINDS, "veil, cut", (lambda: Veil(decoys=2), cut, "squared_error"))
    message, client = ask_of("veil, cut")
    head = unpacked(message)[0]["values"]["head"]
    client.records = tuple(own[:1] for own in client.records)  # one part of three is as large as the batch
    with pytest.raises(ModelMismatch, match="the layers after this one couple samples"):
        client.reply(changed(message, head=head | {"tail": "stacked"}))


@pytest.mark.parametrize("kind", ["plain", "veil", "ppdl"])
def test_what_only_the_models_own_code_can_judge_is_a_refusal_too(kind):
    """BatchNorm in training mode fails for a batch of one record; a hidden layer in place of the head does not fit."""
    message, client = ask_of(kind)
    client.records = tuple(own[:1] for own in client.records)
    with pytest.raises(BadArgument, match=r"request: this client cannot answer: (ValueError|NotTraceable)") as caught:
        client.reply(message)
    assert "input size" not in str(caught.value)
    assert "input size" in str(caught.value.__cause__)
    message, client = ask_of("veil, a perceptron")
    head = unpacked(message)[0]["values"]["head"] | {"weight": "0.weight", "bias": "0.bias", "path": "0", "outputs": 10}
    tensors = {"head/direction": torch.ones(10), "head/partition": torch.zeros(10).long()}
    with pytest.raises(BadArgument, match="request: this client cannot answer: RuntimeError"):
        client.reply(changed(message, tensors, head=head))


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


RECORD = registry.Record("any", "halved", f"{__name__}:Halved")


def test_defences_of_other_packages_are_built_by_the_same_rule(monkeypatch):
    monkeypatch.setattr(registry, "_RECORDS", dict(registry._RECORDS))
    monkeypatch.setattr(registry, "list_installed", lambda group: {"halved": f"{__name__}:RECORD"})
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
        "table of halved must be a number, a short string": {"table": {"a": 1}},
        "factor of halved must be a number, a short string": {"factor": "x" * 5000},
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
    with pytest.raises(
        BadArgument, match="the client's records cannot be used; the reason is in the client's log"
    ) as caught:
        client.reply(message)
    assert "John" not in str(caught.value)
    assert "John Smith" in capsys.readouterr().err
