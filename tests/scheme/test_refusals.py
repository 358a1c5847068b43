"""Every error is raised once, and says where, what and how to mend it."""

import dataclasses
import math
import re

import pytest
import torch
from tests.oracle import batch, built, perturb
from tests.zoo import ZOO
from torch import nn
from torch.nn.utils import parametrizations

import fedveil
from fedveil import errors
from fedveil.defences import Veil


def refused(kind, *texts):
    """The error's class, and its text with everything in `texts` in order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(text) for text in texts))


@pytest.fixture
def model():
    return built(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)))


@pytest.fixture
def plan(model):
    return fedveil.analyse(model, torch.zeros(1, 5))


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class WithBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Branching()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.inner(x))


def test_a_model_that_cannot_be_traced_is_named():
    with refused(errors.NotTraceable, "inner (Branching), line", "its forward reads the values", "Fix: replace `if`"):
        fedveil.analyse(WithBranch(), torch.zeros(1, 3))


def test_an_example_of_the_wrong_shape_is_refused(model):
    with refused(
        errors.NotTraceable, "0 (Linear): torch.export cannot record its forward", "Fix: check that example_inputs"
    ):
        fedveil.analyse(model, torch.zeros(1, 7))


def test_an_example_without_a_batch_is_refused(model):
    with refused(
        errors.BadArgument, "analyse: example_inputs of type Tensor hold no tensor, or one without a batch dimension"
    ):
        fedveil.analyse(model, torch.tensor(1.0))


def test_too_few_examples_are_refused():
    class Two(nn.Module):
        def forward(self, x, other):
            return x + other

    with refused(
        errors.BadArgument,
        "analyse: example_inputs do not fit forward: missing a required argument: 'other'",
        "Fix: pass positional arguments",
    ):
        fedveil.analyse(Two(), torch.zeros(1, 5), head="exposed")


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (nn.Sequential(nn.LayerNorm(5), nn.ReLU()), "it has no Linear and no convolution"),
        (nn.Sequential(nn.Conv1d(5, 5, 1, groups=5), nn.ReLU()), "0 (Conv1d): it has 5 groups"),
        (
            nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 5)), nn.ReLU()),
            "0 (linear): its weight or bias is computed, not a parameter itself",
        ),
    ],
)
def test_a_model_without_a_layer_that_can_take_noise_is_refused_with_the_way_out(net, why):
    way_out = 'analyse(model, inputs, head="exposed"): then clients read the true predictions'
    with refused(errors.HeadNotLinear, "Sequential: no layer can take additive noise", why, "Fix:", way_out):
        fedveil.analyse(net, torch.zeros(1, 5, 5))


@pytest.mark.parametrize("decoys", [0, -1, 10**6, 65, 1.5, True, "2"])
def test_a_number_of_decoys_that_makes_no_sense_is_refused(plan, decoys):
    with refused(errors.BadArgument, "decoys must be an integer from 1 to 64", "Fix: use decoys=2"):
        Veil(decoys=decoys)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(x), x


def test_two_outputs_are_refused():
    with refused(
        errors.AnalysisError,
        "TwoOutputs: the model returns more than one tensor, or a dict",
        "Fix: wrap it in a module that returns the logits alone",
    ):
        fedveil.analyse(TwoOutputs(), torch.zeros(1, 5))


def test_a_model_of_which_nothing_would_be_perturbed_is_refused():
    net = nn.Sequential(nn.Linear(5, 6), nn.Softmax(1))
    with refused(errors.NothingToVeil, "Sequential: a veil would change nothing, because 1 (Softmax)", "Fix:"):
        fedveil.analyse(net, torch.zeros(1, 5), head="exposed")


def test_an_unknown_kind_of_head_is_refused(model):
    with refused(errors.BadArgument, 'analyse: head is \'open\', not one of "linear", "exposed"'):
        fedveil.analyse(model, torch.zeros(1, 5), head="open")


def test_mixed_dtypes_are_refused(model):
    model[0].float()
    with refused(errors.AnalysisError, "must share one dtype and device, found torch.float32 on cpu, torch.float64"):
        fedveil.analyse(model, torch.zeros(1, 5))


def test_a_model_without_anything_to_train_is_refused(model):
    with refused(
        errors.AnalysisError, "Sequential: no parameter that forward reads requires a gradient", "Fix: call req"
    ):
        fedveil.analyse(model.requires_grad_(False), torch.zeros(1, 5))


@pytest.mark.parametrize("groups", [0, 4, 1.0, True, -1])
def test_m_beyond_the_outputs_is_refused(plan, groups):
    with refused(errors.BadArgument, "Veil: groups must be ", f"got {groups!r}", "Fix: use groups=1"):
        Veil(groups=groups).start(plan)


@pytest.mark.parametrize("size", [0, -1.0, math.inf, math.nan, "much"])
def test_noise_of_no_size_is_refused(plan, size):
    with refused(errors.BadArgument, "additive must be a number from 1e-30 to 1e+30, got"):
        Veil(additive=size)
    with refused(errors.BadArgument, "multiplicative must be a number from 1 to 1e+06, got"):
        Veil(multiplicative=size)


def test_an_unknown_loss_is_refused(plan):
    with refused(errors.BadArgument, "there is no loss 'focal'", 'Fix: use one of "squared_error", "cross_entropy"'):
        Veil().start(plan, "focal")


def test_recovery_may_be_repeated_until_the_secret_is_released(answered):
    _, _, secret, updates = answered
    first, second = secret.recover(updates), secret.recover(updates)
    assert all(torch.equal(gradient, second.gradients[name]) for name, gradient in first.gradients.items())
    for _ in range(2):
        secret.release()
    for call in (secret.recover, secret.recover_each):
        with refused(errors.BadArgument, "recover: the secret of this round was released", "Fix: recover the gradient"):
            call(updates)


def test_another_model_than_the_one_analysed_is_refused(plan):
    other = built(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)))
    with refused(errors.ModelMismatch, "0.weight: the plan expects (6, 5) torch.float64, the model has (7, 5)", "Fix:"):
        perturb(other, plan)


def test_another_mode_than_the_one_analysed_is_refused(model, plan):
    model[1].eval()
    with refused(errors.ModelMismatch, "1: its mode (train or eval) is not the one analysed", "Fix: analyse"):
        perturb(model, plan)


def test_a_clients_model_must_match_the_broadcast(model, plan):
    broadcast = perturb(model, plan).broadcast
    inputs, targets = batch((5,), 3)
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with refused(errors.ModelMismatch, "0.weight: the broadcast has (6, 5), the model (7, 5)", "Fix: build"):
        fedveil.client_step(other, broadcast, inputs, targets)
    with refused(errors.ModelMismatch, "Sequential: the broadcast is for a model in train mode", "Fix: model.train()"):
        fedveil.client_step(model.eval(), broadcast, inputs, targets)


def test_empty_and_mismatched_batches_are_refused(model, plan):
    broadcast = perturb(model, plan).broadcast
    inputs, targets = batch((5,), 3)
    with refused(errors.BadArgument, "0 inputs and 0 targets: there must be as many of each, at least 1"):
        fedveil.client_step(model, broadcast, inputs[:0], targets[:0])
    with refused(errors.BadArgument, "6 inputs and 5 targets"):
        fedveil.client_step(model, broadcast, inputs, targets[:5])
    with refused(errors.BadArgument, "shape is (6,), the model's outputs have (6, 3)", "one_hot(targets, 3)"):
        fedveil.client_step(model, broadcast, inputs, torch.zeros(6).long())
    with refused(errors.BadArgument, "shape is (6, 2)", "Fix: targets of shape (6, 3)"):
        fedveil.client_step(model, broadcast, inputs, targets[:, :2])


def test_inference_mode_is_refused(model, plan):
    broadcast = perturb(model, plan).broadcast
    with torch.inference_mode(), refused(errors.BadArgument, "client_step: torch.inference_mode()", "Fix: call it"):
        fedveil.client_step(model, broadcast, *batch((5,), 3))


@pytest.fixture
def answered():
    model = built(ZOO["Bottleneck ResNet"][0])
    data = batch((3, 8, 8))
    plan = fedveil.analyse(model, data[0])
    secret = perturb(model, plan, groups=2)
    broadcast = secret.broadcast
    return model, plan, secret, [fedveil.client_step(model, broadcast, *data) for _ in range(3)]


def changed(update, change):
    return dataclasses.replace(update, passes=update.passes | {HEAD: change(update.passes[HEAD])})


def without(update, name):
    return dataclasses.replace(update, passes={key: p for key, p in update.passes.items() if key != name})


def spoiled(value):
    def spoil(stack):
        stack = stack.clone()
        stack[2, 3, 1] = value
        return stack

    return spoil


HEAD, MEAN = "5.weight", "0.1.running_mean"
BAD = {
    "stale": (lambda u: dataclasses.replace(u, round="ffff"), errors.StaleUpdate, "its update is for round ffff, not"),
    "foreign": (lambda u: dataclasses.replace(u, model="abcd"), errors.ForeignUpdate, "its update is for model abcd"),
    "no samples": (lambda u: dataclasses.replace(u, samples=0), errors.IncompleteUpdate, "counts 0 samples"),
    "few passes": (lambda u: changed(u, lambda p: p[:3]), errors.IncompleteUpdate, f"{HEAD} has 3 passes, not 4"),
    "incomplete": (lambda u: without(u, HEAD), errors.IncompleteUpdate, f"{HEAD} is missing"),
    "no buffer": (lambda u: dataclasses.replace(u, buffers={}), errors.IncompleteUpdate, f"buffer {MEAN} is missing"),
    "misshapen": (
        lambda u: changed(u, lambda p: p[..., :3]), errors.MisshapenUpdate,
        f"{HEAD} is (4, 10, 3) torch.float64, not (4, 10, 16) torch.float64",
    ),
    "float32": (
        lambda u: changed(u, lambda p: p.float()), errors.MisshapenUpdate, f"{HEAD} is (4, 10, 16) torch.float32",
    ),
    "nan": (lambda u: changed(u, spoiled(math.nan)), errors.NonFiniteUpdate, f"{HEAD} holds NaN or infinity"),
    "infinite": (lambda u: changed(u, spoiled(math.inf)), errors.NonFiniteUpdate, f"{HEAD} holds NaN or infinity"),
    "nan in a buffer": (
        lambda u: dataclasses.replace(u, buffers=u.buffers | {MEAN: u.buffers[MEAN] * math.nan}),
        errors.NonFiniteUpdate, f"buffer {MEAN} holds NaN or infinity",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_refused_by_position_and_tensor_and_changes_nothing(answered, name):
    _, _, secret, updates = answered
    spoil, kind, text = BAD[name]
    expected = secret.recover(updates).gradients
    copies = [{name: stack.clone() for name, stack in u.passes.items()} for u in updates]
    with refused(kind, "client 1: ", text):
        secret.recover([updates[0], spoil(updates[1]), updates[2]])
    for update, copied in zip(updates, copies, strict=True):
        assert all(torch.equal(update.passes[name], old) for name, old in copied.items())
    again = secret.recover(updates).gradients
    assert all(torch.equal(again[key], expected[key]) for key in expected)


def test_an_update_of_the_last_round_is_stale(answered):
    model, plan, _, updates = answered
    secret = perturb(model, plan, groups=2)
    with refused(errors.StaleUpdate, "client 0: its update is for round", "Fix: aggregate only answers"):
        secret.recover(updates)


@pytest.mark.parametrize(
    ("weights", "text"),
    [([1, 2], "3 updates and 2 weights"), ([1, -1, 1], "not negative"), ([0, 0, 0], "not all 0")],
)
def test_bad_weights_are_refused(answered, weights, text):
    _, _, secret, updates = answered
    with refused(errors.BadArgument, "recover: ", text):
        secret.recover(updates, weights=weights)


def test_no_updates_are_refused(answered):
    with refused(errors.BadArgument, "0 updates and 0 weights"):
        answered[2].recover([])


def test_no_error_shows_a_secret(answered):
    _, _, secret, updates = answered
    factors = secret.recovery.transform.factors.tolist()
    numbers = {f"{value:.12g}" for value in [*factors, *secret.recovery.coefficients] if abs(value) not in (0, 1)}
    for spoil, _, _ in BAD.values():
        with pytest.raises(errors.UpdateRefused) as caught:
            secret.recover([spoil(updates[0])])
        assert not any(number in str(caught.value) for number in numbers)
