"""Recovery: whatever stands in place of an update or a weight is an error that names it, or a finite result."""

import copy
import dataclasses
import math
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.oracle import batch, built, perturb
from torch import nn

import fedveil
from fedveil import errors
from fedveil.defences.plain import PlainRound, PlainUpdate
from fedveil.scheme import recover as recover_module
from fedveil.scheme.recover import _PassSums, _refuse_overflow

CLIENTS = 3
FINITE = torch.finfo(torch.float32).max
LOSSES = ("squared_error", "cross_entropy")


def network():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


@pytest.fixture(scope="module")
def planned():
    model = built(network).float()
    inputs, values = batch((5,), 4, dtype=torch.float32)
    return model, fedveil.analyse(model, inputs), inputs, values


def answered(planned, loss, **settings):
    """A secret and the updates of its round."""
    model, plan, inputs, values = planned
    entropy = fedveil.Entropy.for_tests(1)  # factors that are all near 1 let nothing overflow
    secret = perturb(model, plan, loss, entropy=entropy, **settings)
    targets = values if loss == "squared_error" else values.argmax(1)
    return secret, [fedveil.client_step(model, secret.broadcast, inputs, targets) for _ in range(CLIENTS)]


@pytest.fixture(scope="module")
def rounds(planned):
    """By loss: a secret, the updates of its round, and the result."""
    found = {loss: answered(planned, loss) for loss in LOSSES}
    return {loss: (secret, updates, secret.recover(updates)) for loss, (secret, updates) in found.items()}


def same(found, expected):
    return all(torch.equal(found.gradients[name], g) for name, g in expected.gradients.items())


def with_passes(update, change):
    return dataclasses.replace(update, passes={name: change(stack) for name, stack in update.passes.items()})


class Odd(torch.Tensor):
    pass


def nested(like):
    return torch.nested.nested_tensor(list(like)) if like.dim() > 1 else torch.nested.nested_tensor([like])


TENSORS = {
    "sparse": lambda t: t.to_sparse(),
    "rows compressed": lambda t: t.reshape(len(t), -1).to_sparse_csr() if t.dim() else t.to_sparse(),
    "mkldnn": lambda t: t.to_mkldnn() if t.dim() else t,
    "meta": lambda t: t.to("meta"),
    "nested": nested,
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "complex": lambda t: t.to(torch.complex64),
    "integer": lambda t: t.long(),
    "bool": lambda t: t.bool(),
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "wants a gradient": lambda t: t.clone().requires_grad_(),
    "has a history": lambda t: t.clone().requires_grad_() * 2,
    "parameter": nn.Parameter,
    "subclass": lambda t: t.as_subclass(Odd),
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
    "strided": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "expanded": lambda t: t.reshape(-1)[:1].expand(t.numel()).view(t.shape),
    "negated": lambda t: torch._neg_view(t),
    "cut": lambda t: t[:1] if t.dim() else t,
    "flat": lambda t: t.reshape(-1),
    "number": lambda t: torch.tensor(1.0),
    "empty": lambda t: t.new_empty(0),
    "more": lambda t: t[None],
    "nan": lambda t: t * math.nan,
    "infinite": lambda t: t / 0,
    "1e20": lambda t: torch.full_like(t, 1e20),
    "1e38": lambda t: torch.full_like(t, 3e38),
    "both ends": lambda t: torch.full_like(t, 3e38) * torch.linspace(-1, 1, t.numel()).view(t.shape),
    "zero": torch.zeros_like,
}
THINGS = [
    None, "text", b"bytes", 0, -1, 1, True, 1.5, math.nan, math.inf, 10**400, 10**5000, 1j, (), [], {}, {"a": 1},
    [None], object(), range(3), range(10**400), np.ones(3), torch.ones(3), torch.ones(()), Odd, Odd(2), iter([1]),
]  # fmt: skip
NAMES = ["0.weight", "3.bias", "1.running_mean", "1.num_batches_tracked", "nobody", "", "x" * 10**4, 7, None, 10**5000]
FIELDS = ["round", "model", "samples", "passes", "buffers"]


def on_float(tensor, change):
    """A changed tensor; of a counter, as a float."""
    with warnings.catch_warnings(action="ignore"):  # torch calls some kinds of tensors experimental
        return change(tensor if tensor.is_floating_point() else tensor.float())


@st.composite
def mutations(draw):
    """A function from an update to what is sent in its place."""
    kind = draw(st.sampled_from(["thing", "field", "tensor", "tensor", "tensor", "value", "extra", "missing"]))
    holder = draw(st.sampled_from(["passes", "buffers"]))
    name, thing = draw(st.sampled_from(NAMES)), draw(st.sampled_from(THINGS))
    change, field = draw(st.sampled_from(list(TENSORS.values()))), draw(st.sampled_from(FIELDS))
    count, which = draw(st.sampled_from([1, 2000])), draw(st.integers(0, 9))

    def mutate(update):
        if kind == "thing":
            return thing
        if kind == "field":
            return dataclasses.replace(update, **{field: thing})
        own = dict(getattr(update, holder))
        if kind == "tensor":
            some = sorted(own)[which % len(own)]
            own[some] = on_float(own[some], change)
        elif kind == "value":
            own[name] = thing
        elif kind == "extra":
            own |= {name: torch.empty(0)} if count == 1 else {f"extra {n}": torch.empty(0) for n in range(count)}
        else:
            own.pop(sorted(own)[0])
        return dataclasses.replace(update, **{holder: own})

    return mutate


numbers = st.one_of(st.floats(), st.integers(), st.sampled_from(THINGS))
weights = st.one_of(st.none(), st.sampled_from(THINGS), st.lists(numbers, min_size=2, max_size=4))
cases = st.tuples(
    st.sampled_from(LOSSES), st.integers(0, CLIENTS - 1), mutations(), weights,
    st.sampled_from(["list", "list", "list", "list", "tuple", "iterator", "thing"]), st.sampled_from(THINGS),
)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=cases)
def test_garbage_is_a_fedveil_error_or_a_result(rounds, case):
    """A FedveilError or a finite result; the updates are as before, and the secret still recovers them."""
    loss, place, mutate, given_weights, form, thing = case
    secret, updates, expected = rounds[loss]
    before = [[t.clone() for t in (*u.passes.values(), *u.buffers.values())] for u in updates]
    sent = [mutate(update) if position == place else update for position, update in enumerate(updates)]
    forms = {"list": sent, "tuple": tuple(sent), "iterator": iter(sent), "thing": thing}
    try:
        found = secret.recover(forms[form], given_weights)
    except errors.FedveilError:
        pass
    else:
        tensors = (*found.gradients.values(), *found.buffers.values())
        assert math.isfinite(found.error)
        assert all(t.isfinite().all() and not t.requires_grad for t in tensors)
    for update, tensors in zip(updates, before, strict=True):
        assert all(map(torch.equal, (*update.passes.values(), *update.buffers.values()), tensors))
    assert same(secret.recover(updates), expected)


@pytest.mark.parametrize("number", range(len(THINGS)))
def test_anything_in_place_of_an_argument_is_refused(rounds, number):
    thing, (secret, *_), values = THINGS[number], rounds["squared_error"], {"round": "a", "model": "b", "samples": 1}
    calls = [
        lambda: secret.recover(thing),
        lambda: secret.recover([thing]),
        lambda: secret.check(thing),
        lambda: fedveil.Update.unpack(thing, {}),
        lambda: fedveil.Update.unpack(values | {"samples": thing if type(thing) is not int else None}, {}),
        lambda: fedveil.Update.unpack(values, {(0, number): thing}),
    ]
    if type(thing) is not dict:
        calls.append(lambda: fedveil.Update.unpack(values, thing))
    for call in calls:
        with pytest.raises(errors.FedveilError):
            call()


def spoil(value):
    def change(stack):
        stack = stack.clone()
        stack[2, 3, 1] = value
        return stack

    return change


def changed(change, name="3.weight", holder="passes"):
    return lambda u: dataclasses.replace(u, **{holder: getattr(u, holder) | {name: change(getattr(u, holder)[name])}})


def field(**values):
    return lambda u: dataclasses.replace(u, **values)


HEAD, MEAN, COUNTER = "3.weight", "1.running_mean", "1.num_batches_tracked"
SAMPLES = [0, -1, True, 1.0, math.nan, "8", None, 2**53 + 1, 10**400, 10**5000]
BAD = {
    "stale": (field(round="ffff"), errors.StaleUpdate, "its update is for round ffff, not"),
    "foreign": (field(model="abcd"), errors.ForeignUpdate, "its update is for model abcd"),
    "few passes": (changed(lambda p: p[:2]), errors.MisshapenUpdate, rf"pass {HEAD} .* got shape \(2, 4, 6\)"),
    "incomplete": (
        lambda u: field(passes={k: p for k, p in u.passes.items() if k != HEAD})(u),
        errors.IncompleteUpdate, f"pass {HEAD} is missing",
    ),
    "no buffer": (field(buffers={}), errors.IncompleteUpdate, f"buffer {MEAN} is missing"),
    "misshapen": (changed(lambda p: p[..., :3]), errors.MisshapenUpdate, rf"{HEAD} must .*6\).* got shape \(3, 4, 3\)"),
    "float64": (changed(torch.Tensor.double), errors.MisshapenUpdate, rf"{HEAD} .* and dtype torch.float64"),
    "nan": (changed(spoil(math.nan)), errors.NonFiniteUpdate, f"pass {HEAD} contains NaN or infinity"),
    "infinite": (changed(spoil(math.inf)), errors.NonFiniteUpdate, f"pass {HEAD} contains NaN or infinity"),
    "nan in a buffer": (
        changed(lambda b: b / 0, MEAN, "buffers"),
        errors.NonFiniteUpdate,
        f"buffer {MEAN} contains NaN",
    ),
    **{
        f"counter {bad.dtype} {bad.dim()}": (
            changed(lambda _, bad=bad: bad, COUNTER, "buffers"),
            errors.MisshapenUpdate, rf"buffer {COUNTER} must have shape \(\) and dtype torch.int64",
        )
        for bad in (torch.ones(2).long(), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32), torch.tensor(True))
    },
    **{
        f"{type(own).__name__} samples {number}": (
            field(samples=own), errors.IncompleteUpdate, r"its number of samples is not an integer from 1 to 2\^53",
        )
        for number, own in enumerate(SAMPLES)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_bad_update_is_refused_by_position_and_reveals_no_secret(rounds, loss, name):
    (secret, updates, expected), (change, kind, text) = rounds[loss], BAD[name]
    numbers = [*secret.recovery.transform.factors.tolist(), *secret.recovery.coefficients]
    with pytest.raises(kind, match=f"client 1: .*{text}") as caught:
        secret.recover([updates[0], change(updates[1]), updates[2]])
    assert not any(f"{value:.12g}" in str(caught.value) for value in numbers if abs(value) not in (0, 1))
    assert same(secret.recover(updates), expected)


def test_recovery_may_be_repeated_until_the_secret_is_released(planned):
    secret, updates = answered(planned, "squared_error")
    assert same(secret.recover(updates), secret.recover(updates))
    for _ in range(2):
        secret.release()
    for call in (secret.recover, secret.recover_each):
        with pytest.raises(errors.BadArgument, match="recover: the secret of this round has been released"):
            call(updates)


WEIGHTS = [
    "111", ["1", "1", "1"], [True] * 3, [1, 1, 10**400], [1, 1, math.nan], [1e308] * 3, [1, 1, None], [1, 1, 1j], 3,
    {0: 1, 1: 1, 2: 1}, iter([1, 1, 1]), range(10**400), [1, 2], [1, -1, 1], [0, 0, 0], [[1], [1], [1]],
]  # fmt: skip


@pytest.mark.parametrize("given", WEIGHTS, ids=[f"case {number}" for number in range(len(WEIGHTS))])
def test_weights_that_cannot_be_used_are_refused(rounds, given):
    secret, updates, _ = rounds["squared_error"]
    with pytest.raises(errors.BadArgument, match=r"recover: .*weights"):
        secret.recover(updates, given)
    with pytest.raises(errors.BadArgument, match="0 updates and 0 weights"):
        secret.recover([])


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor, lambda w: [np.float32(v) for v in w]])
def test_weights_come_in_any_usual_form(rounds, form):
    secret, updates, expected = rounds["squared_error"]
    assert same(secret.recover(updates, form([6.0, 6.0, 6.0])), expected)


@pytest.mark.parametrize("holder", ["passes", "buffers"])
def test_tensors_that_nobody_asked_for_are_refused_in_linear_time(rounds, holder):
    secret, updates, _ = rounds["cross_entropy"]
    more = {f"{number} extra": torch.empty(0) for number in range(100_000)}
    sent = [updates[0], dataclasses.replace(updates[1], **{holder: more | getattr(updates[1], holder)})]
    start = time.process_time()
    with pytest.raises(errors.MisshapenUpdate, match=r"client 1: .*'0 extra' is unexpected"):
        secret.recover(sent)
    assert time.process_time() - start < 0.5  # 4 us per name; checks of every tensor's values take seconds


def test_text_of_a_client_is_cut_and_escaped(rounds):
    secret, updates, _ = rounds["squared_error"]
    for name in ("round", "model"):
        sent = dataclasses.replace(updates[0], **{name: "\n\x1b[31m" + "x" * 10**6})
        with pytest.raises(errors.UpdateRefused) as caught:
            secret.recover([sent])
        assert len(str(caught.value)) < 300
        assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [1e20, 1e25, 1e30])
def test_a_finite_result_is_a_result(planned, loss, size):
    secret, updates = answered(planned, loss, multiplicative=10.0)
    true = secret.recover(updates).gradients
    found = secret.recover([with_passes(update, lambda t: t * size) for update in updates])
    whole = math.sqrt(sum(float(g.double().norm()) ** 2 for g in true.values()))
    for name, gradient in found.gradients.items():  # linear up to rounding, which grows with what cancels
        assert float((gradient.double() / size - true[name]).norm()) <= 1e3 * found.error * whole
    assert found.error == pytest.approx(secret.recover(updates).error, rel=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("place", range(3))
def test_an_overflow_names_its_client(planned, loss, place):
    secret, updates = answered(planned, loss, multiplicative=100.0)
    updates[place] = with_passes(updates[place], lambda t: torch.full_like(t, FINITE))
    with pytest.raises(errors.NonFiniteUpdate, match=f"client {place}: its values .* overflow torch.float32"):
        secret.recover(updates)


def test_where_none_overflows_alone_the_largest_is_named(planned, monkeypatch):
    secret, updates = answered(planned, "squared_error")
    sizes = (1e30, 3e38, 1e38)  # all beyond where float32 can square
    clients = [with_passes(updates[0], lambda t, size=size: torch.full_like(t, size)) for size in sizes]
    monkeypatch.setattr(recover_module, "_is_finite", lambda secret, some, shares: len(some) == 1)
    with pytest.raises(errors.NonFiniteUpdate, match="client 1: its values are finite, but overflow"):
        _refuse_overflow(secret.recovery, clients, [1 / 3] * 3)


@pytest.mark.parametrize("value", [1e15, 1e25, FINITE, math.inf, math.nan])
@pytest.mark.parametrize("alternate", [False, True])
def test_a_refusal_does_not_reveal_the_true_offset(planned, value, alternate):
    """The same pass is refused, or not, whichever place it has, with whatever signs, so that sums may cancel."""
    outcomes = set()
    secret, updates = answered(planned, "cross_entropy", multiplicative=100.0)
    for place in range(3):
        spoilt = with_passes(updates[1], torch.clone)
        for stack in spoilt.passes.values():
            row = stack[place].view(-1)
            row[:] = value
            if alternate:
                row[::2] *= -1
        try:
            secret.recover([updates[0], spoilt])
            outcomes.add("result")
        except errors.NonFiniteUpdate as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1
    assert (outcomes == {"result"}) == (value < FINITE)


def test_buffers_that_overflow_name_their_client(planned):
    model, _, inputs, values = planned
    model = copy.deepcopy(model)
    model[1].eval()  # its buffers carry factors of any size; in training mode, only signs
    planned = model, fedveil.analyse(model, inputs), inputs, values
    secret, updates = answered(planned, "squared_error", multiplicative=100.0)
    floats = [name for name, buffer in updates[1].buffers.items() if buffer.is_floating_point()]
    sent = {size: updates[1].buffers | {name: torch.full((6,), size) for name in floats} for size in (1e25, FINITE)}
    found = secret.recover([updates[0], dataclasses.replace(updates[1], buffers=sent[1e25])])
    assert all(buffer.isfinite().all() for buffer in found.buffers.values())
    with pytest.raises(errors.NonFiniteUpdate, match="client 1: its values are finite, but overflow"):
        secret.recover([updates[0], dataclasses.replace(updates[1], buffers=sent[FINITE])], [1, 1e6])


def test_the_error_is_finite_where_passes_cancel_completely(planned):
    layout = dataclasses.replace(planned[1].layout, dtype=torch.float64)
    sums = _PassSums([1.0, -1.0, 1.0], layout)
    sums.combine(torch.tensor([[1e300], [1e300], [1e-300]], dtype=torch.float64))
    assert sums.finite
    assert sums.error() == sys.float_info.max
    secret, updates = answered(planned, "squared_error")
    assert secret.recover([with_passes(updates[0], torch.zeros_like)]).error < 1e-6


@pytest.mark.parametrize("rounding", [None, 1])
def test_plain_aggregation_takes_large_numbers_and_refuses_others(rounding):
    noise = None if rounding is None else torch.Generator().manual_seed(rounding)
    own = PlainRound(nn.Linear(1, 1), {}, noise)

    def update(gradient, buffer=1.0):
        return PlainUpdate({"w": torch.full((4, 4), gradient)}, {"m": torch.full((4,), buffer), "n": torch.tensor(3)})

    found = own.recover([update(1e20), update(1e25)], [1, 1])
    torch.testing.assert_close(found.gradients["w"], torch.full((4, 4), 5e24), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.buffers["m"], torch.ones(4))
    for bad, name in (
        (update(math.nan), "gradient w"),
        (update(1.0, math.nan), "buffer m"),
        (update(1.0, math.inf), ""),
    ):
        with pytest.raises(errors.NonFiniteUpdate, match=f"client 1: {name}.* contains NaN"):
            own.recover([update(1e20), bad], [1, 1])
