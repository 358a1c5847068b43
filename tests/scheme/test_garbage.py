"""Whatever stands in place of an update or a weight: a FedveilError or a result, and nothing is lost."""

import dataclasses
import math
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

CLIENTS = 3


def network():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


@pytest.fixture(scope="module")
def rounds():
    """By loss: a secret, the answers of its round, and the gradients that they give."""
    model = built(network).float()
    inputs, values = batch((5,), 4, dtype=torch.float32)
    plan, made = fedveil.analyse(model, inputs), {}
    for loss, targets in {"squared_error": values, "cross_entropy": values.argmax(1)}.items():
        secret = perturb(model, plan, loss)
        broadcast = secret.broadcast
        updates = [fedveil.client_step(model, broadcast, inputs, targets) for _ in range(CLIENTS)]
        made[loss] = secret, updates, secret.recover(updates)
    return made


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
    st.sampled_from(["squared_error", "cross_entropy"]), st.integers(0, CLIENTS - 1), mutations(), weights,
    st.sampled_from(["list", "list", "list", "list", "tuple", "iterator", "thing"]), st.sampled_from(THINGS),
)  # fmt: skip


def holds(rounds, case):
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
        assert math.isfinite(found.error)
        assert all(t.isfinite().all() for t in (*found.gradients.values(), *found.buffers.values()))
        assert not any(t.requires_grad for t in (*found.gradients.values(), *found.buffers.values()))
    for update, tensors in zip(updates, before, strict=True):
        assert all(map(torch.equal, (*update.passes.values(), *update.buffers.values()), tensors))
    again = secret.recover(updates)
    assert all(torch.equal(again.gradients[name], g) for name, g in expected.gradients.items())


FEW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FEW
@given(case=cases)
def test_garbage_is_a_fedveil_error_or_a_result(rounds, case):
    holds(rounds, case)


@pytest.mark.slow
@settings(FEW, max_examples=4000, derandomize=False)
@given(case=cases)
def test_much_garbage_is_a_fedveil_error_or_a_result(rounds, case):
    holds(rounds, case)


HEAD = {"round": "a", "model": "b", "samples": 1}


@pytest.mark.parametrize("number", range(len(THINGS)))
def test_anything_in_place_of_an_argument_is_refused(rounds, number):
    thing, (secret, *_) = THINGS[number], rounds["squared_error"]
    calls = [
        lambda: secret.recover(thing),
        lambda: secret.recover([thing]),
        lambda: secret.check(thing),
        lambda: fedveil.Update.unpack(thing, {}),
        lambda: fedveil.Update.unpack(HEAD | {"samples": thing if type(thing) is not int else None}, {}),
        lambda: fedveil.Update.unpack(HEAD, {(0, number): thing}),
    ]
    if type(thing) is not dict:
        calls.append(lambda: fedveil.Update.unpack(HEAD, thing))
    for call in calls:
        with pytest.raises(errors.FedveilError):
            call()


@pytest.mark.parametrize("samples", [0, -1, True, 1.0, math.nan, "8", None, 2**53 + 1, 10**400, 10**5000], ids=type)
def test_samples_are_a_number_of_records(rounds, samples):
    secret, updates, _ = rounds["squared_error"]
    with pytest.raises(errors.IncompleteUpdate, match=r"client 1: its update counts .* samples, not 1 to 2\^53"):
        secret.recover([updates[0], dataclasses.replace(updates[1], samples=samples)])


WEIGHTS = [
    "111", ["1", "1", "1"], [True] * 3, [1, 1, 10**400], [1, 1, math.nan], [1e308] * 3, [1, 1, None], [1, 1, 1j], 3,
    {0: 1, 1: 1, 2: 1}, iter([1, 1, 1]), range(10**400),
]  # fmt: skip


@pytest.mark.parametrize("given", WEIGHTS)
def test_weights_are_numbers(rounds, given):
    secret, updates, _ = rounds["squared_error"]
    with pytest.raises(errors.BadArgument, match=r"recover: .*weight"):
        secret.recover(updates, given)


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor, lambda w: [np.float32(v) for v in w]])
def test_weights_come_in_any_usual_form(rounds, form):
    secret, updates, expected = rounds["squared_error"]
    found = secret.recover(updates, form([6.0, 6.0, 6.0]))
    assert all(torch.equal(found.gradients[name], g) for name, g in expected.gradients.items())


@pytest.mark.parametrize("holder", ["passes", "buffers"])
def test_tensors_that_nobody_asked_for_are_refused_in_linear_time(rounds, holder):
    secret, updates, _ = rounds["cross_entropy"]
    own = getattr(updates[1], holder)
    seconds = []
    for count in (2_000, 100_000):
        more = {f"{number} extra": torch.empty(0) for number in range(count)}
        sent = [updates[0], dataclasses.replace(updates[1], **{holder: more | own})]
        start = time.process_time()
        with pytest.raises(errors.MisshapenUpdate, match=r"client 1: .*'0 extra' was not asked for"):
            secret.recover(sent)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 0.5  # 4 us per name; checks of every tensor's values take seconds


def test_a_counter_has_the_shape_and_type_of_the_servers(rounds):
    secret, updates, _ = rounds["squared_error"]
    name = "1.num_batches_tracked"
    for bad in (torch.ones(2).long(), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32), torch.tensor(True)):
        sent = dataclasses.replace(updates[1], buffers=updates[1].buffers | {name: bad})
        with pytest.raises(errors.MisshapenUpdate, match=rf"client 1: buffer {name} is .*, not \(\) torch.int64"):
            secret.recover([updates[0], sent])


def test_an_update_that_wants_gradients_is_a_result_without_history(rounds):
    secret, updates, expected = rounds["squared_error"]
    passes = {name: stack.clone().requires_grad_() for name, stack in updates[0].passes.items()}
    found = secret.recover([dataclasses.replace(updates[0], passes=passes), *updates[1:]])
    assert all(torch.equal(found.gradients[name], g) for name, g in expected.gradients.items())
    assert not any(g.requires_grad for g in found.gradients.values())


def test_text_of_a_client_is_cut_and_escaped(rounds):
    secret, updates, _ = rounds["squared_error"]
    for field in ("round", "model"):
        sent = dataclasses.replace(updates[0], **{field: "\n\x1b[31m" + "x" * 10**6})
        with pytest.raises(errors.UpdateRefused) as caught:
            secret.recover([sent])
        assert len(str(caught.value)) < 300
        assert "\x1b" not in str(caught.value)
