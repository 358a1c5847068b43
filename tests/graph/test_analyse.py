"""Networks of every common kind are accepted, exact and covered as promised; wrapped modules are refused with a fix."""

import contextlib
import re
from functools import partial

import pytest
import torch
from benchmarks.architectures import ADDITIVE, GROUPS, MULTIPLICATIVE, STRENGTHS, batch, settled
from benchmarks.networks import ARCHITECTURES
from benchmarks.networks.architecture import images, tokens
from benchmarks.networks.encoders import EncoderClassifier
from benchmarks.networks.recurrent import GruClassifier, LstmClassifier
from benchmarks.networks.vit import VisionTransformer
from tests.oracle import built, plain, veiled_round, worst
from torch import nn

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
UNCOVERED = {"TransformerEncoder, padding mask", "GroupNorm, SiLU, standardised weights"}  # users are warned
SPEED = {True: (), False: pytest.mark.slow}


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, id=one.name, marks=SPEED[one.quick]) for one in ARCHITECTURES]
)
def test_every_network_is_exact_in_float64_and_its_shares_add_up_to_one(architecture):
    model = settled(architecture)
    inputs, targets = batch(architecture, model, seed=0)
    warns = pytest.warns(UserWarning, match="of the parameter values are sent unchanged")
    with warns if architecture.name in UNCOVERED else contextlib.nullcontext():
        plan = fedveil.analyse(model, inputs)
    assert list(plan.shares) == list(STRENGTHS)
    assert sum(plan.shares.values()) == pytest.approx(1, abs=1e-12)
    assert all(0 <= share <= 1 for share in plan.shares.values())
    assert plan.shares["bare"] < 1
    noise = {"groups": min(GROUPS, plan.head.outputs), "additive": ADDITIVE, "multiplicative": MULTIPLICATIVE}
    gradients, buffers = plain(model, inputs, targets)
    recovered = veiled_round(model, inputs, targets, seed=0, **noise)
    assert worst(recovered.gradients, gradients) < 1e-9
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    if floating:
        assert worst({name: recovered.buffers[name] for name in floating}, floating) < 1e-9


# As large as a model of its kind usually is in relation to its vocabulary, its image, its width.
WORDS, LENGTH = 1000, 32
ENCODER = partial(EncoderClassifier, vocabulary=WORDS, length=LENGTH, width=64, feedforward=256, layers=4)
LSTM, GRU = (partial(kind, vocabulary=WORDS, width=64, hidden=128) for kind in (LstmClassifier, GruClassifier))


@pytest.mark.parametrize(
    ("build", "example", "least"),
    [
        pytest.param(ENCODER, tokens(WORDS, LENGTH), 0.6, id="TransformerEncoder, post-norm"),
        pytest.param(partial(ENCODER, norm_first=True), tokens(WORDS, LENGTH), 0.6, id="TransformerEncoder, pre-norm"),
        pytest.param(partial(VisionTransformer, image=32, patch=4, width=64, layers=6), images(32), 0.6, id="ViT"),
        pytest.param(LSTM, tokens(WORDS, LENGTH), 0, id="LSTM"),
        pytest.param(partial(LSTM, layers=2), tokens(WORDS, LENGTH), 0, id="LSTM, 2 layers"),
        pytest.param(GRU, tokens(WORDS, LENGTH), 0, id="GRU"),
        pytest.param(partial(GRU, layers=2), tokens(WORDS, LENGTH), 0, id="GRU, 2 layers"),
    ],
)
def test_transformers_and_recurrent_classifiers_are_covered(build, example, least):
    shares = fedveil.analyse(built(build, dtype=torch.float32), example(2, torch.Generator().manual_seed(0))).shares
    assert shares["bare"] <= 0.05, shares
    assert shares["scaled"] + shares["signed"] >= least, shares


def net():
    return mlp(4, 2, hidden=8)


@pytest.mark.parametrize(
    ("make", "text", "fix"),
    [
        (lambda: torch.jit.script(net()), "is a ScriptModule", "not the output of torch.jit.script"),
        (lambda: nn.DataParallel(net()), "wrapped in DataParallel", "model.module"),
    ],
    ids=["script", "DataParallel"],
)
def test_a_module_that_stands_for_another_is_refused_and_what_the_fix_names_trains(make, text, fix):
    model, records = make(), (torch.randn(8, 4), torch.arange(8) % 2)
    for call in (
        lambda: fedveil.Federation(model, [records], "plain"),
        lambda: fedveil.Federation(model, [records], "veil"),
        lambda: fedveil.analyse(model, records[0]),
    ):
        with pytest.raises(BadArgument, match=f"(?s){re.escape(text)}.*Fix: .*{re.escape(fix)}"):
            call()
    if fix != "model.module":
        return
    model = model.module
    assert len(fedveil.Federation(model, [records]).fit(2).records) == 2
