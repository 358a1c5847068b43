"""What travels: tensors and plain values, and no secret among them."""

import json
import math
import pickle

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


def test_a_head_without_its_tensors_and_one_of_another_tail_are_refused(sent):
    values, tensors = sent[-1].pack()
    with pytest.raises(BadArgument, match="the head's tensor 'offset' is missing"):
        fedveil.Broadcast.unpack(values, {name: t for name, t in tensors.items() if name != "head/offset"})
    with pytest.raises(BadArgument, match="there is no tail 'odd'"):
        fedveil.Broadcast.unpack(values | {"head": values["head"] | {"tail": "odd"}}, tensors)


def test_every_dtype_travels_as_it_is_and_so_do_tensors_that_share_memory():
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"none": torch.empty(0, 3), "number": torch.tensor(5.0), "turned": tensors["torch.float32"].T}
    values = {"a": 1, "b": [True, None, "ü"], "c": {"d": 0.1}}
    found = from_bytes(to_bytes("test", values, tensors), "test")
    assert found[0] == values
    assert found[1].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[1][name].dtype == tensor.dtype
        assert torch.equal(found[1][name], tensor)


def bare(head):
    """A safetensors file without tensors, with any head."""
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = to_bytes("test", {"a": 1}, {"x": torch.arange(3.0)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        pickle.dumps({"x": print}),
        GOOD[:-1],
        GOOD + b"0",
        GOOD.replace(b"F32", b"STR"),
        GOOD.replace(b"[3]", b"[9]"),
        (2**62).to_bytes(8, "little") + GOOD[8:],
        bare({}),
        bare({"__metadata__": {"fedveil": "{"}}),
        bare({"__metadata__": {"fedveil": "[]"}}),
        bare({"__metadata__": {"fedveil": '{"kind": "test", "format": 2}'}}),
        bare({"__metadata__": {"fedveil": '{"kind": "test", "format": 2, "values": 3}'}}),
        bare({"__metadata__": {"fedveil": "[" * 100_000}}),
    ],
    ids=range(14),
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(BadArgument, match="test: it cannot be read: "):
        from_bytes(data, "test")


def test_a_message_of_another_kind_or_format_is_refused(monkeypatch):
    with pytest.raises(BadArgument, match="ask: it is 'test' in format 2, not 'ask' in 2"):
        from_bytes(GOOD, "ask")
    with pytest.raises(BadArgument, match=r"(?s)test: it is 'test' in format 9, .*Fix: install the same fedveil"):
        from_bytes(GOOD.replace(b'format\\": 2', b'format\\": 9'), "test")


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


def test_no_parameter_is_broadcast_as_it_is(sent):
    model, _, _, _, broadcast = sent
    for name, value in broadcast.parameters.items():
        assert not torch.equal(value, model.get_parameter(name)), name


def test_the_view_is_the_papers_model_and_the_centred_view_its_base(sent):
    model, _, _, known, broadcast = sent
    recovery = known.perturbation.recovery
    view = fedveil.client_view(model, broadcast)
    head = broadcast.head
    gamma = known.gamma * head.direction
    entry = next(e for e in recovery.plan.layout.entries if e.name == "5.weight")
    flat = torch.cat([p.detach().reshape(-1) for p in (*model.parameters(),)])
    scaled = (
        recovery.transform.factors[entry.start : entry.stop]
        * flat[recovery.transform.sources[entry.start : entry.stop]]
    )
    torch.testing.assert_close(view[-1].weight, scaled.view(10, 16) + gamma[:, None])
    torch.testing.assert_close(view[-1].bias, model[-1].bias + gamma)
    assert torch.equal(fedveil.client_view(model, broadcast, centred=True)[-1].weight, broadcast.parameters["5.weight"])


def test_the_size_of_the_noise_is_only_in_the_public_offset():
    model = built(ZOO["MLP L=3"][0])
    plan = fedveil.analyse(model, torch.zeros(1, 12))
    bases, offsets = [], []
    for additive in (1.0, 1e6):
        secret = perturb(model, plan, additive=additive, entropy=fedveil.Entropy.for_tests(3))
        broadcast = secret.broadcast
        bases.append(broadcast.parameters["6.weight"])
        offsets.append(float(broadcast.head.offset))
    assert torch.equal(*bases)
    assert math.isclose(offsets[1] / 1e6, offsets[0], rel_tol=1e-12)
