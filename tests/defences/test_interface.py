"""What all defences have in common: they train, resume, and refuse settings and states that do not fit."""

import itertools
import math
import re

import pytest
import torch
from tests.defences.runs import DEFENCES, NETS, adam, federation, loss_before_and_after, records, same, values
from tests.oracle import worst

from fedveil import Entropy, errors
from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil

EVERY = {**DEFENCES, "private": lambda: Private(Plain(), 5.0, 1e-3, entropy=Entropy.for_tests(0))}
EVERY_WAY = pytest.mark.parametrize("options", [{}, {"whole_shard": True}, {"participation": 0.5}], ids=str)
CASES = [case for case in itertools.product(EVERY, NETS) if case != ("private", "resnet, batch")]  # is refused


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize(("name", "net"), CASES)
def test_training_lowers_the_loss(name, net, loss):
    run = federation(net, EVERY[name](), records(NETS[net][1], (24,) * 3), optimizer=adam, loss=loss)
    before, after = loss_before_and_after(run, 20)
    assert after < before


@EVERY_WAY
@pytest.mark.parametrize("net", ["mlp", "resnet, batch"])
@pytest.mark.parametrize("name", ["plain", "ppdl", "dbcl", "spn"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, name, net, options):
    whole, again = (federation(net, EVERY[name](), optimizer=adam, **options) for _ in range(2))
    whole.fit(rounds=3, folder=tmp_path)
    whole.fit(rounds=6)
    again.resume(tmp_path)
    again.fit(rounds=6)
    assert same(values(again.model), values(whole.model))
    assert all(same(again.clients.client.state(k), whole.clients.client.state(k)) for k in range(3) if name == "spn")


NEUTRAL = {
    "spn": lambda: SPN(weight=0),
    "ppdl": lambda: PPDL(fraction=1),
    "ppdl, clip": lambda: PPDL(fraction=1, clip=1e9),
    "ppdl, clip and selection": lambda: PPDL(fraction=1 - 1e-9, clip=1e9),
    "ppdl, noise": lambda: PPDL(fraction=1, sigma=1e-300),
}


@EVERY_WAY
@pytest.mark.parametrize("net", ["mlp", "resnet, batch"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_with_neutral_settings_a_run_is_the_plain_run_bit_for_bit(name, net, options):
    runs = [federation(net, defence, fuse=False, **options) for defence in (NEUTRAL[name](), Plain())]
    history, _ = [run.fit(rounds=3) for run in runs]
    assert same(*[values(run.model) for run in runs])
    assert [record["error"] for record in history.records] == [0.0] * 3


@pytest.mark.parametrize("name", EVERY)
def test_a_whole_shard_in_batches_is_one_step_on_all_of_it(name):
    runs = [federation("mlp", EVERY[name](), whole_shard=True, batch_size=size) for size in (8, 100)]
    for run in runs:
        run.step()
    numbers = sum(p.numel() for p in runs[0].model.parameters()) + runs[0].shards.inputs.numel()
    bound = 1e-9 if name == "veil" else torch.finfo(torch.float64).eps * numbers  # as many additions, at most
    assert worst(*[values(run.model) for run in runs]) < bound
    for client in range(3):
        first, second = (run.clients.client.state(client) for run in runs)
        assert first.keys() == second.keys()
        assert name != "spn" or worst(first, second) < bound
        assert name != "ppdl" or len(first["norms"]) == len(second["norms"]) == 1


NAN, INF = math.nan, math.inf
ARGUMENTS = {
    DBCL: {"q": (1, 2.0, True), "seed": (-1, 0.5)},
    PPDL: {
        "fraction": (0.0, 1.01, NAN, "0.1", True), "sigma": (-1e-3, INF, "x"),
        "clip": (0.0, "mean", INF, NAN, True), "seed": (1.5,),
    },
    SPN: {"weight": (-0.1, NAN, 1e101), "margin": (INF,), "lr": (True, "fast"), "bits": (0, 8.0, 1025), "seed": (-1,)},
    lambda **own: Private(**{"inner": Plain(), "clip": 1.0, "noise": 1.0, **own}): {
        "clip": (0.0, -1.0, INF, True, "1"), "noise": (-0.1, NAN), "delta": (0.0, 1),
    },
    Veil: {
        "decoys": (0, -1, 10**6, 65, 1.5, True, "2"), "groups": (0, -1, 65, 1.0, True),
        "additive": (0, -1.0, INF, NAN, "much", True), "multiplicative": (0, -1.0, INF, NAN, "much"),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, bad) for make, own in ARGUMENTS.items() for name, values in own.items() for bad in values],
)
def test_settings_out_of_range_are_refused(make, name, value):
    with pytest.raises(errors.BadArgument, match=rf"^\w+: {name} must be .*got {re.escape(repr(value))}"):
        make(**{name: value})


def test_states_of_another_defence_are_refused():
    wrong = {"noise": torch.zeros(1)}
    for name in ("ppdl", "spn"):
        with pytest.raises(errors.BadArgument, match="the state belongs to another defence"):
            federation("mlp", EVERY[name]()).clients.client.restore(3, wrong)
    for name in ("dbcl", "private"):
        with pytest.raises(errors.BadArgument, match="the state belongs to another defence"):
            federation("mlp", EVERY[name]()).defence_server.restore(wrong)
