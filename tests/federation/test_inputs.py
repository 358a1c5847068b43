"""Federations whose models take more than one tensor: the same run as with one."""

import copy
import json

import pytest
import torch
from tests.forms import FORMS, Apart, Whole, Words, network, pooled_descent, records, reformed
from tests.oracle import built, worst
from torch import nn

from fedveil import Entropy, Federation
from fedveil.data import Data, Part
from fedveil.defences import Veil
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.runs.folder import record_run

RATE = 0.1


def sgd(parameters):
    return torch.optim.SGD(parameters, RATE)


def run(kind, clients, defence="plain", rounds=6, batch_size=8, **options):
    federation = Federation(network(kind), clients, defence, sgd, batch_size=batch_size, **options)
    federation.fit(rounds=rounds)
    return federation


def values(federation):
    return {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"fuse": False}, {"whole_shard": True}, {"participation": 0.5}],
    ids=["fused", "apart", "shard", "part"],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_inputs_is_the_run_with_one_tensor(form, options):
    kind, change = FORMS[form]
    found = run(kind, reformed(records(), change), **options)
    assert worst(values(found), values(run(Whole, records(), **options))) < 1e-13


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"whole_shard": True}], ids=["fused", "apart", "shard"])
@pytest.mark.parametrize("form", FORMS)
def test_a_veiled_run_with_inputs_of_any_form_is_the_plain_run_with_one(form, options):
    veil = Veil(groups=2, additive=100.0, entropy=Entropy.for_tests(0))
    kind, change = FORMS[form]
    found = run(kind, reformed(records(), change), veil, **options)
    assert worst(values(found), values(run(Whole, records(), **options))) < 1e-9


def words(sizes=(5, 9, 3), classes=4):
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        numbers = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 7, (size, 3), generator=generator)
        found.append(({"ids": ids, "numbers": numbers}, torch.randint(0, classes, (size, 3), generator=generator)))
    return found


def test_token_ids_reach_the_model_as_whole_numbers_and_train_as_on_one_machine():
    clients = words()
    found = Federation(built(Words), clients, "plain", sgd, loss="cross_entropy")
    found.fit(rounds=5)
    pooled = [torch.cat([inputs[name] for inputs, _ in clients]) for name in ("numbers", "ids")]

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")

    expected = pooled_descent(built(Words), pooled, torch.cat([y for _, y in clients]), loss, 5, RATE)
    assert worst(values(found), expected) < 1e-12
    assert found.shards.inputs["ids"].dtype == torch.int64


def test_a_test_set_in_the_same_form_is_evaluated():
    clients = words()
    found = Federation(built(Words), clients, "plain", sgd, loss="cross_entropy")
    last = found.fit(rounds=1, test=clients[0]).last
    (inputs, targets), model = clients[0], found.model
    outputs = model(**inputs).detach()
    assert last["accuracy"] == pytest.approx(float((outputs.argmax(-1) == targets).double().mean()))
    entropy = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    assert last["loss"] == pytest.approx(float(entropy) / len(targets))


def test_answers_come_in_batches_and_in_order():
    (inputs, _), model = words((10,))[0], built(Words)
    for batch_size in (3, 10, 1000):
        torch.testing.assert_close(predict(model, inputs, batch_size=batch_size), model(**inputs).detach())


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_resumed_run_ends_as_if_it_had_not_stopped(form, tmp_path):
    kind, change = FORMS[form]
    clients = reformed(records(), change)
    run(kind, clients, rounds=4).save(tmp_path)
    second = Federation(network(kind), clients, "plain", sgd, batch_size=8)
    second.resume(tmp_path)
    second.fit(rounds=9)
    straight = values(run(kind, clients, rounds=9))
    assert all(torch.equal(tensor, straight[name]) for name, tensor in values(second).items())


@pytest.mark.parametrize(
    ("targets", "text"), [(["a", "b"], "cannot become a tensor"), (torch.tensor(3), "are one number")]
)
def test_targets_without_records_are_refused(targets, text):
    with pytest.raises(BadArgument, match=f"client 0: targets {text}"):
        Federation(network(Whole), [(torch.zeros(2, 6).double(), targets)], "plain", sgd)


def test_keys_in_another_order_are_the_same_form():
    clients = words()
    inputs, targets = clients[1]
    mixed = [clients[0], (dict(reversed(inputs.items())), targets), clients[2]]
    runs = [Federation(built(Words), parts, "plain", sgd, loss="cross_entropy") for parts in (clients, mixed)]
    assert list(mixed[0][0]) != list(mixed[1][0])
    for federation in runs:
        federation.fit(rounds=3)
    assert worst(values(runs[1]), values(runs[0])) < 1e-13


def test_a_run_of_such_records_writes_its_folder_and_page(tmp_path):
    parts = words()
    as_float = [({"ids": x["ids"], "numbers": x["numbers"].float()}, y) for x, y in parts]
    data = Data("words", Part(*as_float[0]), Part(*as_float[1]), classes=tuple("abcd"))
    federation = Federation(built(Words, dtype=torch.float32), as_float, "plain", sgd, loss="cross_entropy")
    summary = record_run(federation, tmp_path, data, {"clients": 3, "model": "words"}, "-", rounds=2)
    assert 0 <= summary.metrics["accuracy"] <= 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert "Answers on the test data" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 2


def test_a_parameter_that_a_form_leaves_unused_keeps_its_value():
    class Spare(Apart):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    found = run(Spare, reformed(records(), FORMS["dict"][1]))
    assert torch.equal(found.model.spare.weight, network(Spare).spare.weight)
    assert not torch.equal(found.model.net[0].weight, network(Spare).net[0].weight)


def test_a_model_that_returns_several_tensors_is_refused():
    class Several(Whole):
        def forward(self, x):
            return {"logits": self.net(x)}

    with pytest.raises(BadArgument, match="Several: its forward returns dict, not one tensor"):
        run(Several, records())


def changed(number, change):
    """Two clients with dicts of two tensors, of which one is changed."""
    clients = [(dict(inputs), targets) for inputs, targets in reformed(records((4, 5)), FORMS["dict"][1])]
    inputs, targets = clients[number]
    clients[number] = (change(inputs), targets)
    return clients


def with_value(place, value):
    def change(inputs):
        inputs = copy.deepcopy(inputs)
        inputs["b"][place] = value
        return inputs

    return change


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        (
            changed(1, lambda x: {"a": x["a"], "b": x["b"][:3]}),
            r"client 1 has 3 records in inputs\['b'\] and 5",
        ),
        (changed(0, lambda x: {"a": x["a"], "b": torch.tensor(1.0)}), r"client 0 has 0 records in inputs\['b'\]"),
        (
            changed(1, lambda x: {"a": x["a"], "c": x["b"]}),
            r"client 1 has inputs\['c'\], which .* not and no",
        ),
        (changed(1, lambda x: {"a": x["a"]}), r"client 1 has no inputs\['b'\], which client 0 has"),
        (changed(1, lambda x: {**x, "c": x["a"]}), r"client 1 has inputs\['c'\], which client 0 has not"),
        (changed(1, lambda x: {**x, "b": x["a"]}), r"another shape than client 0's: inputs\['b'\] \(2,\) and \(4,\)"),
        (changed(1, lambda x: {**x, "b": x["b"].long()}), r"client 1's inputs\['b'\] are torch.int64, client 0's"),
        (changed(1, lambda x: {**x, "b": None}), r"client 1's inputs\['b'\] is None, client 0's a tensor"),
        (changed(0, lambda x: {**x, "b": {1, 2}}), r"client 0's inputs\['b'\] is a set, not a tensor"),
        (changed(1, with_value((2, 1), torch.nan)), r"client 1, record 2: inputs\['b'\] hold NaN or infinity"),
        (changed(0, with_value((3, 0), torch.inf)), r"client 0, record 3: inputs\['b'\] hold NaN or infinity"),
        (changed(0, lambda x: {}), "client 0's inputs, a dict, hold no tensor"),
        (changed(0, lambda x: 3), "client 0's inputs, a int, hold no tensor"),
        (
            [records((4,))[0], *reformed(records((4,)), FORMS["tuple"][1])],
            "client 1's inputs are a tuple, client 0's a tensor",
        ),
        (
            [*reformed(records((4,)), FORMS["tuple"][1]), records((4,))[0]],
            "client 1's inputs are a tensor, client 0's a tuple",
        ),
    ],
)
@pytest.mark.parametrize("classes", [False, True], ids=["numbers", "classes"])
def test_inputs_that_do_not_belong_together_are_named_before_the_model_is_called(clients, text, classes):
    if classes:  # for these Federation asks the model for the shape of its outputs
        clients = [(inputs, targets.argmax(1)) for inputs, targets in clients]
    with pytest.raises(BadArgument, match=text):
        Federation(network(Apart), clients, "plain", sgd)
