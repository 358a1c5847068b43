"""What travels: tensors and plain values, and no secret among them."""

import json

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, perturb, perturb_known, plain, worst
from tests.zoo import ZOO

import fedveil
from fedveil.errors import BadArgument
from fedveil.wire import from_bytes, to_bytes


@pytest.fixture
def sent():
    model = built(ZOO["Bottleneck ResNet"][0])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # a norm's weight starts at 1, and a known value times a factor shows it
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs, targets = batch((3, 8, 8))
    entropy = fedveil.Entropy.for_tests(1)  # a number that is there by chance must not fail the search
    known = perturb_known(model, fedveil.analyse(model, inputs), groups=4, multiplicative=10.0, entropy=entropy)
    return model, inputs, targets, known, known.perturbation.broadcast


def over_the_wire(message):
    kind = type(message).__name__.lower()
    return type(message).unpack(*from_bytes(to_bytes(kind, *message.pack()), kind))


def test_a_round_over_bytes_is_the_same_round(sent):
    model, inputs, targets, known, broadcast = sent
    update = fedveil.client_step(model, over_the_wire(broadcast), inputs, targets)
    recovered = known.perturbation.recover([over_the_wire(update)])
    direct = known.perturbation.recover([fedveil.client_step(model, broadcast, inputs, targets)])
    for name, gradient in direct.gradients.items():
        assert torch.equal(recovered.gradients[name], gradient)
    for name, buffer in direct.buffers.items():
        assert torch.equal(recovered.buffers[name], buffer)
    assert worst(recovered.gradients, plain(model, inputs, targets)[0]) < 1e-9


def test_an_exposed_head_travels_too():
    model = built(ZOO["CNN"][0])
    secret = perturb(model, fedveil.analyse(model, torch.zeros(1, 3, 8, 8), head="exposed"))
    assert over_the_wire(secret.broadcast).head is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"round": 5}, "round must be str, got int"),
        ({"model": None}, "model must be str, got NoneType"),
        ({"trainable": [1]}, r"trainable must be list\[str\]"),
        ({"trainable": "5.weight"}, r"trainable must be list\[str\], got str"),
        ({"head": [1]}, "head must be dict, got list"),
        ({"head": {}}, "path must be str, got NoneType"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(sent, change, text):
    values, tensors = sent[-1].pack()
    with pytest.raises(BadArgument, match=text):
        fedveil.Broadcast.unpack(values | change, tensors)


def test_tensors_that_do_not_belong_to_the_head_and_unknown_tails_are_refused(sent):
    values, tensors = sent[-1].pack()
    missing = {name: t for name, t in tensors.items() if name != "head/offset"}
    extra = {"head/more": torch.zeros(1)}
    for head, changed in ((values["head"], missing), (values["head"], tensors | extra), (None, tensors)):
        with pytest.raises(BadArgument, match=r"the head's tensors must be (direction, partition, offset|none)"):
            fedveil.Broadcast.unpack(values | {"head": head}, changed)
    with pytest.raises(BadArgument, match="unexpected tensor 'stray'"):
        fedveil.Broadcast.unpack(values, tensors | {"stray": torch.zeros(1)})
    with pytest.raises(BadArgument, match="there is no tail 'odd'"):
        fedveil.Broadcast.unpack(values | {"head": values["head"] | {"tail": "odd"}}, tensors)


def secret_numbers(known):
    """Every number that must stay on the server: factors, gamma, the anchor's d, v, the true head."""
    _, *terms, v = known.perturbation.recovery.coefficients
    factors = [r for r in known.units.scale.tolist() if abs(r) != 1]
    return np.array([*factors, *[1 / r for r in factors], *known.gamma.tolist(), *[-c for c in terms], v])


def test_no_secret_value_is_in_what_is_broadcast(sent):
    model, _, _, known, broadcast = sent
    metadata, tensors = broadcast.pack()
    values = np.concatenate([tensor.numpy().ravel().astype(np.float64) for tensor in tensors.values()])
    wanted = np.abs(secret_numbers(known))
    values = np.unique(np.abs(values))
    values = values[values > 0]
    nearest = np.abs(np.log(values[:, None] / wanted)).min(0)
    assert (nearest > 1e-9).all(), "a secret number was sent"
    text = json.dumps(metadata)
    assert not any(f"{number:.12g}" in text for number in wanted if number != 1)
    head = model[-1].weight.detach().numpy().ravel()
    assert not np.isin(head, tensors["parameter/5.weight"]).any()
    assert not any(torch.equal(value, model.get_parameter(name)) for name, value in broadcast.parameters.items())


def test_the_view_is_the_papers_model_and_the_centred_view_its_base(sent):
    model, _, _, known, broadcast = sent
    recovery = known.perturbation.recovery
    view = fedveil.client_view(model, broadcast)
    head = broadcast.head
    gamma = known.gamma * head.direction
    entry = next(e for e in recovery.plan.layout.entries if e.name == "5.weight")
    flat = torch.cat([p.detach().reshape(-1) for p in (*model.parameters(),)])
    rows, transform = slice(entry.start, entry.stop), recovery.transform
    scaled = transform.factors[rows] * flat[transform.sources[rows]]
    torch.testing.assert_close(view[-1].weight, scaled.view(10, 16) + gamma[:, None])
    torch.testing.assert_close(view[-1].bias, model[-1].bias + gamma)
    assert torch.equal(fedveil.client_view(model, broadcast, centred=True)[-1].weight, broadcast.parameters["5.weight"])
