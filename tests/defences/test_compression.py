"""Top-k with memory and 8-bit updates, against slow definitions."""

import pytest
import torch
from tests.defences.runs import adam, federation, same, values

from fedveil.defences.compression import Int8, Int8Codec, TopK
from fedveil.defences.plain import PlainUpdate
from fedveil.errors import BadArgument, FedveilError, NonFiniteUpdate
from fedveil.models import mlp
from fedveil.scheme.losses import find_loss

LOSS = find_loss("squared_error")
MODEL = mlp(3, 2, hidden=4)


def updates(count=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,)}
    return [PlainUpdate({n: torch.randn(s, generator=draw) for n, s in shapes.items()}, {}) for _ in range(count)]


def flat(update):
    return torch.cat([own.flatten() for own in update.gradients.values()])


def test_top_k_sends_the_largest_and_remembers_the_rest():
    client, kept = TopK(0.25).client(MODEL, torch.zeros(1, 3), LOSS), torch.zeros(17)
    for own in updates():
        kept = kept + flat(own)
        sent, chosen = flat(client.upload(own, 2)), kept.abs().argsort(descending=True)[:4].tolist()
        wanted = torch.zeros(17)
        for index in chosen:
            wanted[index] = kept[index]
        assert torch.equal(sent, wanted)
        kept = kept - wanted
    assert torch.equal(client.state(2)["unsent"], kept)
    assert client.state(0) == {}
    first = updates()[0]
    alone = TopK(0.25).client(MODEL, torch.zeros(1, 3), LOSS).upload(first)
    assert not torch.equal(flat(client.upload(first, 2)), flat(alone))  # memory matters
    assert torch.equal(flat(client.upload(first, 1)), flat(alone))  # and is each client's own


def test_everything_that_clients_computed_is_sent_in_the_end():
    client, own = TopK(0.1).client(MODEL, torch.zeros(1, 3), LOSS), updates(1)[0]
    nothing = PlainUpdate({name: torch.zeros_like(value) for name, value in own.gradients.items()}, {})
    total = flat(client.upload(own)) + sum(flat(client.upload(nothing)) for _ in range(10))
    assert torch.equal(total, flat(own))


def test_every_element_is_within_half_a_level_and_has_eight_bits():
    client = Int8().client(MODEL, torch.zeros(1, 3), LOSS)
    for own in updates():
        sent = client.upload(own)
        for name, value in own.gradients.items():
            scale = float(value.abs().max()) / 127
            assert float((sent.gradients[name] - value).abs().max()) <= scale * (
                0.5 + 127 * torch.finfo(value.dtype).eps
            )
            assert len(sent.levels[name].unique()) <= 255
            assert sent.levels[name].abs().max() == 127
    zero = client.upload(PlainUpdate({"a": torch.zeros(3), "b": torch.full((2,), 1e-45)}, {}))
    assert all(not own.any() and own.isfinite().all() for own in zero.gradients.values())


@pytest.mark.parametrize("make", [lambda: TopK(0.2), Int8], ids=["topk", "int8"])
def test_messages_hold_the_update_and_are_as_small_as_they_are_said_to_be(make):
    defence, model = make(), mlp(6, 4, hidden=10)
    example = torch.zeros(2, 6)
    started = defence.server(model, example, LOSS).start_round(model)
    client = defence.client(model, example, LOSS)
    own = PlainUpdate({name: torch.randn(p.shape) for name, p in model.named_parameters()}, {})
    sent = client.upload(own)
    packed = defence.codec.encode_update(sent)
    found = defence.codec.decode_update(started, model, *packed, 0)
    assert same(found.gradients, sent.gradients)
    size = sum(tensor.numel() * tensor.element_size() for tensor in packed[1].values())
    assert started.recover([sent], [1.0]).figures["bytes_up"] == size


def test_levels_and_scales_that_do_not_fit_are_refused():
    model = mlp(6, 4, hidden=10)
    started = Int8().server(model, torch.zeros(2, 6), LOSS).start_round(model)
    name = next(iter(dict(model.named_parameters())))
    own = PlainUpdate({name: torch.randn(p.shape) for name, p in model.named_parameters()}, {})
    _, good = Int8().codec.encode_update(Int8().client(model, torch.zeros(2, 6), LOSS).upload(own))
    for change in (
        {f"scale/{name}": torch.tensor(float("nan"))},
        {f"scale/{name}": torch.tensor(3e38)},
        {f"scale/{name}": torch.ones(2)},
        {f"level/{name}": good[f"level/{name}"].float()},
        {f"level/{name}": good[f"level/{name}"][:1]},
        {"level/other": torch.zeros(1, dtype=torch.int8)},
    ):
        with pytest.raises(FedveilError, match="client 5"):
            Int8Codec().decode_update(started, model, {}, {**good, **change}, 5)
    with pytest.raises(BadArgument, match="not quantised"):
        Int8Codec().encode_update(own)


@pytest.mark.parametrize("make", [lambda: TopK(0.2), Int8], ids=["topk", "int8"])
def test_an_update_that_is_not_finite_is_refused(make):
    client = make().client(MODEL, torch.zeros(1, 3), LOSS)
    with pytest.raises(NonFiniteUpdate, match="client 1"):
        client.upload(PlainUpdate({"a": torch.tensor([float("nan"), 1.0])}, {}), 1)


def test_a_resumed_run_remembers_what_was_not_sent(tmp_path):
    whole, again = (federation("mlp", TopK(0.1), optimizer=adam) for _ in range(2))
    whole.fit(rounds=3, folder=tmp_path)
    whole.fit(rounds=6)
    again.resume(tmp_path)
    again.fit(rounds=6)
    assert same(values(again.model), values(whole.model))


def test_the_whole_update_is_plain_training():
    whole, plain = federation("mlp", TopK(1)), federation("mlp", "plain", fuse=False)
    whole.fit(rounds=3)
    plain.fit(rounds=3)
    assert same(values(whole.model), values(plain.model))
