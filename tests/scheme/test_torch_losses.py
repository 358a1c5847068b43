"""Loss modules of torch mean what they say: recovered gradients are those of the module on each client's batch."""

import itertools
import json
from functools import partial

import pytest
import torch
from tests.oracle import Network, built, perturb, planned, worst
from torch import nn

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.scheme import CrossEntropy, find_loss
from fedveil.scheme.losses import Custom

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total")  # torch's, of KLDivLoss
FLOAT64 = 1e-9  # the project's promise
DRAW = torch.Generator().manual_seed(1)
NUMBERS = torch.randn(15, 3, generator=DRAW).double()
CLASSES = torch.randint(0, 3, (15,), generator=DRAW)
YES = (NUMBERS > 0).double()
SIGNS = 2 * YES - 1
COUNTS = torch.randint(0, 5, (15, 3), generator=DRAW).double()
ROWS = NUMBERS.softmax(1)
LABELS = torch.tensor([[0, 2, -1], [1, -1, 0], [2, 0, 1]] * 5)  # of several classes, up to the first -1
WEIGHT, POSITIVE = torch.tensor([0.25, 1.5, 3.0]), torch.tensor([2.0, 0.5, 1.0])  # float32, as users write them
SIZES = {2: (4, 11), 3: (4, 8, 3)}
MODULES = {
    "cross-entropy": (nn.CrossEntropyLoss, CLASSES),
    "class weights": (partial(nn.CrossEntropyLoss, weight=WEIGHT), CLASSES),
    "ignored class": (partial(nn.CrossEntropyLoss, ignore_index=2), CLASSES),
    "smoothing": (partial(nn.CrossEntropyLoss, label_smoothing=0.2), CLASSES),
    "all of them": (partial(nn.CrossEntropyLoss, weight=WEIGHT, ignore_index=1, label_smoothing=0.1), CLASSES),
    "probabilities": (partial(nn.CrossEntropyLoss, weight=WEIGHT, label_smoothing=0.1), ROWS),
    "plain probabilities": (nn.CrossEntropyLoss, ROWS),
    "likelihood": (partial(nn.NLLLoss, weight=WEIGHT), CLASSES),
    "binary": (nn.BCEWithLogitsLoss, YES),
    "positive weights": (partial(nn.BCEWithLogitsLoss, weight=WEIGHT, pos_weight=POSITIVE), YES),
    "squares": (nn.MSELoss, NUMBERS),
    "distances": (nn.L1Loss, NUMBERS),
    "smooth distances": (partial(nn.SmoothL1Loss, beta=0.5), NUMBERS),
    "Huber": (partial(nn.HuberLoss, delta=0.5), NUMBERS),
    "counts": (partial(nn.PoissonNLLLoss, full=True), COUNTS),
    "divergence": (nn.KLDivLoss, ROWS),
    "logarithms": (partial(nn.KLDivLoss, log_target=True), ROWS.log()),
    "margins": (partial(nn.MultiMarginLoss, p=2, margin=0.5, weight=WEIGHT), CLASSES),
    "margins of labels": (nn.MultiLabelMarginLoss, LABELS),
    "soft margins of labels": (partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHT), YES),
    "soft margins": (nn.SoftMarginLoss, SIGNS),
    "embeddings": (partial(nn.HingeEmbeddingLoss, margin=0.5), SIGNS),
}
CASES = [
    (name, reduction)
    for name, reduction in itertools.product(MODULES, ["mean", "sum", "none", "batchmean"])
    if reduction != "batchmean" or MODULES[name][0] is nn.KLDivLoss
]


def parts(targets, sizes):
    """Each client's inputs and targets."""
    inputs = torch.randn(15, 4, generator=torch.Generator().manual_seed(0)).double()
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def per_client(loss):
    """The module in its model's dtype; of values without a reduction, the mean over samples of their sum."""
    own = loss.double() if isinstance(loss, nn.Module) else loss
    return lambda y, t: own(y, t) if own(y, t).dim() == 0 else own(y, t).reshape(len(y), -1).sum(1).mean()


def torch_gradient(build, loss, data):
    """The clients' gradients by torch, averaged by their numbers of records."""
    model, value, records = built(build), per_client(loss), sum(len(x) for x, _ in data)
    total = sum(len(x) / records * value(model(x), t) for x, t in data)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(total, list(model.parameters())), strict=True))


def round_gradient(build, loss, data, defence, **options):
    """The gradient of a federation's first round."""
    options = {"batch_size": 15, "optimizer": lambda p: torch.optim.SGD(p, 0.1), **options}
    return fedveil.Federation(built(build), data, defence, loss=loss, **options).step().gradients


def net():
    return mlp(4, 3, layers=2, hidden=8)


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize(("name", "reduction"), CASES)
def test_a_round_has_the_gradient_of_the_module(name, reduction, defence):
    kind, targets = MODULES[name]
    for clients, sizes in SIZES.items():
        data = parts(targets, sizes)
        veil = fedveil.Veil(1 + clients % 3, additive=100.0) if defence == "veil" else defence
        found = round_gradient(net, kind(reduction=reduction), data, veil)
        assert worst(found, torch_gradient(net, kind(reduction=reduction), data)) < FLOAT64


def pixels():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 1), nn.ReLU(), nn.Conv2d(5, 3, 1))


def tokens():
    """Classes on axis 1, behind a Linear."""
    layers = {"body": nn.Linear(2, 6), "head": nn.Linear(6, 3)}
    return Network(lambda m, x: m.head(m.body(x.reshape(-1, 2, 2)).relu()).transpose(1, 2), **layers)


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("build", [pixels, tokens])
def test_positions_of_a_record_count_as_in_torch(build, reduction, defence):
    shape = (15, *built(build)(torch.zeros(1, 4).double()).shape[2:])
    draw = torch.Generator().manual_seed(2)
    indices, numbers = torch.randint(0, 3, shape, generator=draw), torch.randn(15, 3, *shape[1:], generator=draw)
    losses = [nn.CrossEntropyLoss(reduction=reduction), nn.CrossEntropyLoss(weight=WEIGHT, reduction=reduction)]
    losses.append(nn.CrossEntropyLoss(ignore_index=0, reduction=reduction))
    for loss, targets in [*[(own, indices) for own in losses], (nn.MSELoss(reduction=reduction), numbers.double())]:
        data = parts(targets, SIZES[2])
        assert worst(round_gradient(build, loss, data, defence), torch_gradient(build, loss, data)) < FLOAT64


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize(("name", "reduction"), [("squares", "mean"), ("class weights", "sum"), ("smoothing", "mean")])
def test_a_shard_in_several_batches_has_the_gradient_of_the_whole_shard(name, reduction, defence):
    kind, targets = MODULES[name]
    data = parts(targets, SIZES[2])
    found = round_gradient(net, kind(reduction=reduction), data, defence, batch_size=4, whole_shard=True)
    assert worst(found, torch_gradient(net, kind(reduction=reduction), data)) < FLOAT64


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_a_weighted_mean_of_a_shard_needs_a_single_batch(defence):
    loss, data = nn.CrossEntropyLoss(weight=WEIGHT), parts(CLASSES, SIZES[2])
    found = round_gradient(net, loss, data, defence, whole_shard=True)
    assert worst(found, torch_gradient(net, loss, data)) < FLOAT64
    with pytest.raises(BadArgument, match="divides by the weights of all samples, but this batch contains only some"):
        round_gradient(net, loss, data, defence, batch_size=4, whole_shard=True)


@pytest.mark.parametrize(
    ("loss", "fused"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(weight=WEIGHT, reduction="none"), True),
        (nn.HuberLoss(), True),
        (nn.CrossEntropyLoss(weight=WEIGHT), False),
        (nn.CrossEntropyLoss(ignore_index=0), False),
        (nn.MSELoss(reduction="sum"), False),
    ],
)
def test_batches_of_clients_are_fused_unless_the_module_couples_their_samples(loss, fused):
    targets = CLASSES if isinstance(loss, nn.CrossEntropyLoss) else NUMBERS
    assert fedveil.Federation(built(net), parts(targets, SIZES[2]), "veil", loss=loss).clients.fused is fused


def test_a_module_without_weights_is_the_loss_of_this_library():
    assert find_loss(nn.CrossEntropyLoss(label_smoothing=0.1)) == CrossEntropy(None, 0.1, average_positions=True)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_sent_with_its_options(name):
    kind, targets = MODULES[name]
    model, (inputs, own) = built(net), parts(targets, (15,))[0]
    for reduction in ("mean", "sum"):
        perturbation = perturb(model, planned(model, inputs), kind(reduction=reduction))
        values, tensors = perturbation.broadcast.pack()
        received = fedveil.Broadcast.unpack(json.loads(json.dumps(values)), tensors)
        found = perturbation.recover([fedveil.client_step(model, received, inputs, own)]).gradients
        assert worst(found, torch_gradient(net, kind(reduction=reduction), [(inputs, own)])) < FLOAT64


def test_one_target_per_record_fits_one_output():
    def build():
        return mlp(4, 1, hidden=8)

    found = round_gradient(build, nn.MSELoss(), parts(NUMBERS[:, 0], SIZES[2]), "veil")
    assert worst(found, torch_gradient(build, nn.MSELoss(), parts(NUMBERS[:, :1], SIZES[2]))) < FLOAT64


class Own(nn.MSELoss):
    pass


def test_a_class_that_derives_from_a_module_is_a_users_function():
    assert isinstance(find_loss(Own(reduction="none")), Custom)


PADDED = torch.where(CLASSES == 2, -100, CLASSES)


@pytest.mark.parametrize(
    ("loss", "targets", "text"),
    [
        (nn.GaussianNLLLoss(), NUMBERS, "(?s)GaussianNLLLoss requires more than outputs.*Fix: pass a function"),
        (nn.MSELoss(reduction="median"), NUMBERS, "there is no reduction 'median'"),
        (nn.MSELoss(), CLASSES, r"shape is \(15,\), but the model's outputs have shape \(15, 3\)"),
        (nn.CrossEntropyLoss(), PADDED, '(?s)classes range from -100 to 1.*Fix: use loss="token_cross_entropy"'),
        (nn.NLLLoss(), CLASSES.double(), r"torch.nn.NLLLoss does not accept targets torch.float64 of shape \(15,\)"),
        (nn.MultiMarginLoss(), CLASSES + 1, "targets: torch.nn.MultiMarginLoss does not accept targets torch.int64"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(15, 1)), YES, "its weight has one number per sample of a batch"),
    ],
)
def test_what_a_module_cannot_be_is_refused(loss, targets, text):
    with pytest.raises(BadArgument, match=text) as caught:
        round_gradient(net, loss, parts(targets, (15,)), "plain")
    cause = caught.value.__cause__
    assert isinstance(cause, BadArgument | None) or str(cause) not in str(caught.value)  # it may hold a target


def test_the_fixes_work():
    for loss, targets in [(nn.CrossEntropyLoss(), PADDED), (nn.BCEWithLogitsLoss(weight=torch.ones(15, 1)), YES)]:
        data = parts(targets, (15,))
        found = round_gradient(net, fedveil.BatchLoss(loss.double()), data, "veil")
        assert worst(found, torch_gradient(net, loss, data)) < FLOAT64


def test_classes_of_tokens_on_the_last_axis_are_refused_under_a_veil():
    model = built(lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3)))
    inputs, targets = torch.randn(5, 3, 2).double(), torch.randint(0, 3, (5, 3))
    broadcast = perturb(model, planned(model, inputs), nn.CrossEntropyLoss()).broadcast
    with pytest.raises(BadArgument, match="expects classes on axis 1, but these outputs have them on the last axis"):
        fedveil.client_step(model, broadcast, inputs, targets)
