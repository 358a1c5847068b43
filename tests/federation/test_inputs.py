"""Federations whose models take more than one tensor: the same run as with one."""

import pytest
import torch
from tests.forms import FORMS, Apart, Whole, Words, network, pooled_descent, records, reformed
from tests.oracle import built, worst
from torch import nn

from fedveil import Entropy, Federation
from fedveil.defences import Veil
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict

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


def test_keys_in_another_order_are_the_same_form():
    clients = words()
    inputs, targets = clients[1]
    mixed = [clients[0], (dict(reversed(inputs.items())), targets), clients[2]]
    runs = [Federation(built(Words), parts, "plain", sgd, loss="cross_entropy") for parts in (clients, mixed)]
    assert list(mixed[0][0]) != list(mixed[1][0])
    for federation in runs:
        federation.fit(rounds=3)
    assert worst(values(runs[1]), values(runs[0])) < 1e-13


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
