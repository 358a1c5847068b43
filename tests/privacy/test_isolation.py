"""Attributes of modules are restored, whatever a forward pass does to them."""

import contextlib

import pytest
import torch
from torch import nn

from fedveil.privacy.isolation import attempt, keep_attributes


class Busy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count, self.seen, self.known, self.kinds, self.total = 0, [1], {"a": 1}, {1}, torch.ones(2)

    def forward(self, x):
        self.count += 1
        self.seen.append(2)
        self.known["b"] = 2
        self.kinds.add(2)
        self.total += 1
        self.last = x
        del self.inner.in_features
        return self.inner(x)


def test_attributes_are_restored_in_place():
    model = Busy()
    seen, total, weight = model.seen, model.total, model.inner.weight
    with keep_attributes(model):
        model(torch.ones(1, 2))
        assert (model.count, len(model.seen), len(model.known), len(model.kinds), float(model.total[0])) == (
            1,
            2,
            2,
            2,
            2,
        )
    assert (model.count, model.seen, model.known, model.kinds) == (0, [1], {"a": 1}, {1})
    assert model.total is total
    assert model.seen is seen
    assert bool((total == 1).all())
    assert not hasattr(model, "last")
    assert model.inner.in_features == 2
    assert model.inner.weight is weight


def test_attributes_are_restored_after_an_error_and_hooks_can_still_be_removed():
    model = Busy()
    handle = model.register_forward_hook(lambda *_: None)
    with contextlib.suppress(ValueError), keep_attributes(model):
        model.count = 7
        raise ValueError
    handle.remove()
    assert not model.count
    assert not model._forward_hooks


def test_an_attempt_stops_only_for_the_keyboard():
    def fail(kind):
        raise kind

    assert attempt(lambda: 3) == 3
    assert all(attempt(lambda kind=kind: fail(kind)) is None for kind in (ValueError, SystemExit, BaseException))
    with pytest.raises(KeyboardInterrupt):
        attempt(lambda: fail(KeyboardInterrupt))
