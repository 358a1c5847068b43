"""What travels: plain arrays and plain values, and no secret among them."""

import json
import math

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, gamma_of, plain, worst
from tests.zoo import ZOO

import fedveil
from fedveil.errors import BadArgument


@pytest.fixture
def sent():
    model = built(ZOO["Bottleneck ResNet"][0])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # a norm's weight starts at 1, and a known value times a factor shows it
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs, targets = batch((3, 8, 8))
    entropy = fedveil.Entropy.for_tests(1)  # a number that is there by chance must not fail the search
    secret = fedveil.draw_secret(fedveil.analyse(model, inputs), groups=4, multiplicative=10.0, entropy=entropy)
    return model, inputs, targets, secret, fedveil.perturb(model, secret)


def over_the_wire(message):
    arrays, metadata = message.pack()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    return type(message).unpack({k: a.copy() for k, a in arrays.items()}, json.loads(json.dumps(metadata)))


def test_a_round_over_plain_arrays_is_the_same_round(sent):
    model, inputs, targets, secret, broadcast = sent
    update = fedveil.client_step(model, over_the_wire(broadcast), inputs, targets)
    recovered = fedveil.recover(secret, [over_the_wire(update)])
    direct = fedveil.recover(secret, [fedveil.client_step(model, broadcast, inputs, targets)])
    for name, gradient in direct.gradients.items():
        assert torch.equal(recovered.gradients[name], gradient)
    for name, buffer in direct.buffers.items():
        assert torch.equal(recovered.buffers[name], buffer)
    assert worst(recovered.gradients, plain(model, inputs, targets)[0]) < 1e-9


def test_an_exposed_head_travels_too():
    model = built(ZOO["CNN"][0])
    secret = fedveil.draw_secret(fedveil.analyse(model, torch.zeros(1, 3, 8, 8), head="exposed"))
    assert over_the_wire(fedveil.perturb(model, secret)).head is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "update"}, "this message is 'update', not 'broadcast'"),
        ({"round": 5}, "metadata field 'round' must be str, got int"),
        ({"trainable": [1]}, "metadata field 'trainable' must be a list of str"),
    ],
)
def test_metadata_of_the_wrong_kind_is_refused(sent, change, text):
    arrays, metadata = sent[-1].pack()
    with pytest.raises(BadArgument, match=text):
        fedveil.Broadcast.unpack(arrays, metadata | change)


def secret_numbers(secret):
    """Every number that must stay on the server: factors, gamma, the anchor's d, v, the true head."""
    d = [-c for c in secret._sent.how.coefficients[1:-1]]
    v = secret._sent.how.coefficients[-1]
    factors = [r for r in secret._noise.scale.tolist() if abs(r) != 1]
    return np.array([*factors, *[1 / r for r in factors], *gamma_of(secret).tolist(), *d, v])


def test_no_secret_value_is_in_what_is_broadcast(sent):
    model, _, _, secret, broadcast = sent
    arrays, metadata = broadcast.pack()
    values = np.concatenate([array.ravel().astype(np.float64) for array in arrays.values()])
    wanted = np.abs(secret_numbers(secret))
    values = np.unique(np.abs(values))
    values = values[values > 0]
    nearest = np.abs(np.log(values[:, None] / wanted)).min(0)
    assert (nearest > 1e-9).all(), "a secret number was sent"
    text = json.dumps(metadata)
    assert not any(f"{number:.12g}" in text for number in wanted if number != 1)
    head = model[-1].weight.detach().numpy().ravel()
    assert not np.isin(head, arrays["parameter/5.weight"]).any()


def test_no_parameter_is_broadcast_as_it_is(sent):
    model, _, _, _, broadcast = sent
    for name, value in broadcast.parameters.items():
        assert not torch.equal(value, model.get_parameter(name)), name


def test_the_view_is_the_papers_model_and_the_centred_view_its_base(sent):
    model, _, _, secret, broadcast = sent
    view = fedveil.client_view(model, broadcast)
    head = broadcast.head
    gamma = gamma_of(secret) * head.direction
    entry = next(e for e in secret.plan.layout.entries if e.name == "5.weight")
    flat = torch.cat([p.detach().reshape(-1) for p in (*model.parameters(),)])
    scaled = (
        secret._sent.cover.factors[entry.start : entry.stop]
        * flat[secret._sent.cover.sources[entry.start : entry.stop]]
    )
    torch.testing.assert_close(view[-1].weight, scaled.view(10, 16) + gamma[:, None])
    torch.testing.assert_close(view[-1].bias, model[-1].bias + gamma)
    assert torch.equal(fedveil.client_view(model, broadcast, centred=True)[-1].weight, broadcast.parameters["5.weight"])


def test_the_size_of_the_noise_is_only_in_the_public_offset():
    model = built(ZOO["MLP L=3"][0])
    plan = fedveil.analyse(model, torch.zeros(1, 12))
    bases, offsets = [], []
    for additive in (1.0, 1e6):
        secret = fedveil.draw_secret(plan, additive=additive, entropy=fedveil.Entropy.for_tests(3))
        broadcast = fedveil.perturb(model, secret)
        bases.append(broadcast.parameters["6.weight"])
        offsets.append(float(broadcast.head.offset))
    assert torch.equal(*bases)
    assert math.isclose(offsets[1] / 1e6, offsets[0], rel_tol=1e-12)
