"""Double-blind learning: what a sketch is, what the server's step is a gradient of, and what clients never hold."""

import copy
import itertools

import numpy as np
import pytest
import torch
from tests.defences.runs import NETS, federation, reachable, records, same
from tests.oracle import Network, batch, built, worst
from tests.sessions import Session
from torch import nn
from torch.nn import functional as F

from fedveil import errors
from fedveil.defences import Plain, Samples
from fedveil.defences.dbcl import DBCL, Sketch, SketchedConv2d, SketchedLinear
from fedveil.scheme.losses import CrossEntropy, SquaredError

EPS = torch.finfo(torch.float64).eps
every_net = pytest.mark.parametrize("net", NETS)


def matrix(sketch):
    """S, (n, s), entry by entry."""
    S = torch.zeros(sketch.fan_in, sketch.inputs.shape[1], dtype=sketch.signs.dtype)
    for row, bucket in np.ndindex(*sketch.inputs.shape):
        S[sketch.inputs[row, bucket], bucket] = sketch.signs[row, bucket]
    return S


def drawn(n, q, seed=0):
    return Sketch.draw(n, q, np.random.default_rng(seed))


def prepared(model, inputs, loss=None, **options):
    return Session(DBCL(**{"seed": 0, **options}), model, inputs[:2], loss or SquaredError())


def rounding(model, *passes):
    """How far two float64 orders of the same gradient may part, relative to its size.

    Every module and the loss, on the way there and back, add at most half an eps for each term of the longest sum: over
    a unit's inputs, or over the samples and pixels of a batch. Twice that, for the two of them.
    """
    modules = [module for module in model.modules() if not module._modules]
    inputs = [m.weight[0].numel() for m in modules if isinstance(m, nn.Linear | nn.Conv2d)]
    longest = max(inputs + [x.numel() // x.shape[1] for x in passes])
    return 2 * (len(modules) + 1) * longest * EPS


@pytest.mark.parametrize(("n", "q"), [(4, 2), (7, 2), (9, 4), (3, 3), (200, 3)])
def test_a_sketch_puts_q_inputs_into_each_bucket_and_multiplies_by_s_or_its_transpose(n, q):
    sketch, s = drawn(n, q), n // q
    S, rows, small = matrix(sketch), *(torch.arange(3.0 * size).view(3, size).double() for size in (n, s))
    assert torch.equal(sketch.project(rows), rows @ S)  # integers: nothing is rounded
    assert torch.equal(sketch.back_project(small), small @ S.T)
    assert torch.equal(S.T @ S, q * torch.eye(s, dtype=S.dtype))
    assert set(S.unique().tolist()) <= {-1, 0, 1}
    assert S.abs().sum(0).eq(q).all()
    assert S.abs().sum(1).sort().values.tolist() == [0] * (n % q) + [1] * (s * q)


def test_draws_are_uniform():
    n, q, draws = 7, 2, 4000
    chance = np.random.default_rng(0)
    outer = [S @ S.T for S in (matrix(Sketch.draw(n, q, chance)) for _ in range(draws))]
    mean = torch.stack(outer).mean(0)
    kept, together = 6 / 7, (6 / 7) * (1 / 6)  # of an input, and of two inputs in one bucket
    sigma = torch.full((n, n), (together / draws) ** 0.5, dtype=torch.float64)
    sigma.fill_diagonal_((kept * (1 - kept) / draws) ** 0.5)
    assert ((mean - kept * torch.eye(n)).abs() < 5 * sigma).all()
    assert ((torch.stack(outer).abs().mean(0).fill_diagonal_(together) - together).abs() < 5 * sigma).all()


def literal(layer, sketch, x, small, bias):
    """Z = (U S) W~^T + b with U the patches of each group, as the method is written."""
    S = matrix(sketch).to(x)
    if isinstance(layer, nn.Linear):
        return (x @ S) @ small.T + bias
    U = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
    parts = zip(U.chunk(layer.groups, -1), small.chunk(layer.groups), strict=True)
    z = torch.cat([(u @ S) @ w.T for u, w in parts], -1) + bias
    side = (x.shape[-1] + 2 * layer.padding[0] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1) // layer.stride[0]
    return z.transpose(1, 2).unflatten(-1, (side + 1, -1))


LAYERS = {
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear over tokens": (lambda: nn.Linear(8, 5), (3, 8)),
    "conv": (lambda: nn.Conv2d(3, 4, 3), (3, 7, 7)),
    "stride and padding": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 7, 7)),
    "dilation": (lambda: nn.Conv2d(3, 4, 3, dilation=2, padding=2), (3, 7, 7)),
    "one pixel": (lambda: nn.Conv2d(6, 4, 1, stride=2), (6, 6, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 5, 5)),
}


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_sketched_layer_is_the_dense_one_with_the_weight_spread_out(build, shape, q):
    layer, (x, _) = built(build), batch(shape)
    sketch = drawn(layer.weight[0].numel(), q)
    small = (SketchedLinear if isinstance(layer, nn.Linear) else SketchedConv2d)(layer, sketch)
    assert small.weight.shape == (layer.weight.shape[0], sketch.fan_in // q)
    delta = torch.randn(small(x).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def passes(run, *given):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
        z = run(*leaves)
        return [z, *torch.autograd.grad(z, leaves, delta if given[0] is x else delta.abs())]

    def client(x, weight, bias):
        return torch.func.functional_call(small, {"weight": weight, "bias": bias}, (x,))

    given = x, small.weight, small.bias
    found, true = passes(client, *given), passes(lambda *g: literal(layer, sketch, *g), *given)
    # Both sum the same products, no sum longer than this: so they part by its length times eps, of the sum of sizes.
    positive = Sketch(sketch.inputs, sketch.signs.abs(), sketch.fan_in)
    sizes = passes(lambda *g: literal(layer, positive, *g), *[tensor.abs() for tensor in given])
    terms = max(sketch.fan_in, delta.numel() // delta.shape[1]) + 4
    for a, b, size in zip(found, true, sizes, strict=True):
        assert ((a - b).abs() <= terms * EPS * size).all()


def spread_out(model, broadcast, names):
    """The network with weights W S S^T, as a function of the parameters W."""

    def run(parameters, buffers, inputs):
        values = {**parameters, **buffers}
        for name in names:
            W, S = parameters[name], matrix(broadcast.network.get_submodule(name.rpartition(".")[0]).sketch)
            values[name] = (W.flatten(1) @ S @ S.T).view_as(W)
        return torch.func.functional_call(model, values, (inputs,))

    return run


def two_clients(net, loss, **options):
    """A round of two clients with weights 30 and 10, and the losses of the dense network."""
    build, shape = NETS[net]
    model, data = built(build), records(shape, (5, 6), classes=loss.name == "cross_entropy")
    defence = prepared(model, data[0][0], loss, **options)
    sent = defence.broadcast(model)
    updates = [defence.step(sent, Samples(*part)) for part in data]
    run, losses = spread_out(model, sent, defence.server.sketched), []
    for x, y in data:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outputs = run(dict(model.named_parameters()), buffers, x)
        losses.append(loss.values(outputs, loss.dense(y, outputs)).mean())
    return model, data, defence, updates, losses


@every_net
@pytest.mark.parametrize("loss", [SquaredError(), CrossEntropy()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("q", [2, 4])
def test_a_round_is_the_gradient_of_the_sketched_loss_with_respect_to_the_weights(net, loss, q):
    model, data, defence, updates, losses = two_clients(net, loss, q=q)
    found = defence.recover(updates, [30.0, 10.0]).gradients
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(0.75 * losses[0] + 0.25 * losses[1], list(parameters.values()))
    true = dict(zip(parameters, gradients, strict=True))
    assert all(found[name].shape == p.shape for name, p in parameters.items())
    assert worst(found, true) < rounding(model, *[x for x, _ in data])
    plain = Session(Plain(), model, data[0][0], loss)
    theirs = plain.broadcast() and plain.recover([plain.step(model, Samples(*part)) for part in data], [30.0, 10.0])
    assert worst(theirs.gradients, true) > 0.1  # it is not that of the plain loss,
    assert worst(defence.recover(updates, [10.0, 30.0]).gradients, true) > 0.1  # and weights matter


def leaked(thing, secrets):
    """Names of weights whose shape, memory or values a client could reach."""
    names = set()
    for tensor, (name, secret) in itertools.product(reachable(thing), secrets.items()):
        storage = tensor.untyped_storage()
        values = secret.new_empty(0)
        if tensor.dtype == secret.dtype:
            values.set_(storage)
        same = values.numel() == secret.numel() and torch.equal(values.sort().values, secret.flatten().sort().values)
        if tensor.shape == secret.shape or storage.data_ptr() == secret.untyped_storage().data_ptr() or same:
            names.add(name)
        assert values.numel() in (0, tensor.numel())  # nothing hides behind a view
    return names


@every_net
def test_a_client_can_reach_no_sketched_weight(net):
    run, shape = federation(net, DBCL()), NETS[net][1]
    run.fit(rounds=2)  # the server's parameters have gradients now
    model = run.model
    defence = Session(run.defence, model, batch(shape, 4)[0])
    model.extra = [model.get_parameter(name) for name in defence.server.sketched]  # beside the layers' own
    secrets = {name: model.get_parameter(name).detach() for name in defence.server.sketched}
    assert len(secrets) == sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules()) - 1 - (len(shape) == 3)
    sent = defence.broadcast(model)
    update = defence.step(sent, Samples(*batch(shape, 4)))
    further, _ = defence.accumulate(sent, None, update)
    for held in (sent, update, further, defence.client_view(sent), defence.upload(update)):
        assert reachable(held)
        assert not leaked(held, secrets)
    assert leaked(model, secrets) == set(secrets)  # the search finds what is there
    open_ = {name: p for name, p in model.named_parameters() if name not in secrets}
    copies = dict(sent.network.named_parameters())
    assert all(torch.equal(copies[name], p) and copies[name] is not p for name, p in open_.items())


@every_net
@pytest.mark.parametrize("training", [True, False])
def test_the_view_answers_as_the_sketched_network_in_both_modes(net, training):
    run, shape = federation(net, DBCL(seed=3)), NETS[net][1]
    run.fit(rounds=2)
    model = run.model.train(training)
    sent = run.defence_server.start_round(model).broadcast
    view, (inputs, _) = run.defence.client_view(model, sent), batch(shape)
    assert all(module.training == training for module in view.modules())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    dense = spread_out(model, sent, run.defence_server.sketched)(dict(model.named_parameters()), buffers, inputs)
    answers, allowed = view(inputs), rounding(model, inputs)
    assert (answers - dense).norm() <= allowed * dense.norm()
    assert (answers - model(inputs)).norm() > 0.01 * dense.norm()
    seen = dict(view.named_buffers())
    assert set(seen) == set(buffers)
    for name, value in buffers.items():
        assert (seen[name] - value).double().norm() <= allowed * value.double().norm()


def test_a_view_is_its_owners_and_takes_its_sketch_along():
    run = federation("resnet, batch", DBCL())
    sent = run.defence_server.start_round(run.model).broadcast
    view = run.defence.client_view(run.model, sent).eval()
    assert sent.network.training
    inputs, _ = batch(NETS["resnet, batch"][1])
    before = view(inputs)
    run.fit(rounds=2)
    assert torch.equal(view(inputs), before)
    single, coarser = view.float()(inputs.float()), torch.finfo(torch.float32).eps / EPS
    assert single.dtype == torch.float32
    assert (single - before).norm() < coarser * rounding(run.model, inputs) * before.norm()
    assert view.to("meta")(inputs.to("meta")).shape == before.shape


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet, none"])
def test_fused_clients_give_what_single_ones_give(net):
    first, second = (federation(net, DBCL(seed=0), fuse=fuse).step().gradients for fuse in (True, False))
    assert worst(first, second) < rounding(built(NETS[net][0]), torch.empty(24, *NETS[net][1]))


def test_sketches_are_new_in_every_round_and_run_unless_seeded():
    def inputs(**options):
        model, (x, _) = built(lambda: NETS["mlp"][0]()), batch((6,))
        defence = prepared(model, x, **options)
        found = [defence.broadcast(model).network[0].sketch for _ in range(3)]
        return [tuple([*sketch.inputs.flatten().tolist(), *sketch.signs.flatten().tolist()]) for sketch in found]

    assert len({*inputs(seed=None), *inputs(seed=None)}) == 6
    assert inputs(seed=1) == inputs(seed=1) != inputs(seed=2)
    assert len(set(inputs(seed=1))) == 3


def test_a_broadcast_leaves_the_model_and_the_global_generator_alone():
    model, (x, _) = built(NETS["resnet, batch"][0]), batch((3, 8, 8))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    prepared(model, x).broadcast(model)
    assert same(model.state_dict(), before)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training and not module._forward_hooks for module in model.modules())


def backwards():
    """Layers that are registered in another order than they are called."""
    return Network(
        lambda m, x: m.head(F.relu(m.hidden(F.relu(m.second(F.relu(m.first(x)))).flatten(1)))),
        head=nn.Linear(8, 3),
        hidden=nn.Linear(4 * 16, 8),
        second=nn.Conv2d(4, 4, 3, padding=1),
        first=nn.Conv2d(2, 4, 3, padding=1),
    )


def test_the_first_convolution_and_the_last_linear_are_those_that_are_called_so():
    model, (x, _) = built(backwards), batch((2, 4, 4))
    for options, layers in [
        ({}, {"hidden", "second"}),
        ({"skip_first_conv": False}, {"first", "hidden", "second"}),
        ({"skip_last": False}, {"head", "hidden", "second"}),
        *[({"skip": skip}, {"second"}) for skip in (["hidden"], "hidden.weight")],
    ]:
        assert set(prepared(model, x, **options).server.sketched) == {f"{layer}.weight" for layer in layers}


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    return model


def small_first():
    return nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3), nn.Linear(3, 3))


def circular():
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, nn.Flatten(), nn.Linear(8, 3))


def bilinear():
    class Twice(nn.Bilinear):
        def forward(self, x):
            return super().forward(x, x)

    return nn.Sequential(Twice(4, 4, 4), nn.Linear(4, 3), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("build", "options", "text"),
    [
        (lambda: nn.Linear(4, 3), {}, r"dbcl: none of the weights would be sketched(?s:.*)Fix: .*skip_last=False"),
        (tied, {}, r"dbcl, 0.weight: several layers share this weight(?s:.*)Fix: use DBCL\(skip=\('0',\)\)"),
        (
            small_first,
            {},
            r"dbcl, 1.weight: the layer has 1 inputs per unit, fewer than q = 2(?s:.*)Fix: .*skip=\('1',\)",
        ),
        (circular, {}, r"dbcl, 2.weight: a convolution with padding_mode 'circular' cannot be sketched"),
        (bilinear, {}, r"dbcl, 0.weight: parameters of Twice cannot be sketched, only the weights of Linear"),
        (tied, {"skip": ["5"]}, r"dbcl: skip contains '5', but the model has no parameters there"),
    ],
)
def test_models_that_would_not_be_hidden_are_refused(build, options, text):
    with pytest.raises(errors.BadArgument, match=text):
        prepared(built(build), batch((4,))[0], **options)


@pytest.mark.parametrize(
    ("build", "skip"),
    [(tied, ["0", "1"]), (small_first, ["1"]), (circular, ["1", "2"]), (bilinear, ["0"])],
)
def test_what_is_refused_may_be_sent_as_it_is(build, skip):
    model, (x, y) = built(build), batch((4,), 3)
    defence = prepared(model, x, skip=skip, skip_last=False)
    sent = defence.broadcast(model)
    result = defence.recover([defence.step(sent, Samples(x, y))], [1.0])
    assert set(result.gradients) == {name for name, _ in model.named_parameters()}
    for path in skip:
        assert torch.equal(sent.network.get_submodule(path).weight, model.get_submodule(path).weight)


def test_late_updates_are_refused():
    model, (x, y) = built(NETS["mlp"][0]), batch((6,), 4)
    defence = prepared(model, x)
    late = defence.step(defence.broadcast(model), Samples(x, y))
    fresh = defence.step(defence.broadcast(model), Samples(x, y))
    with pytest.raises(errors.StaleUpdate, match="client 1: the update is for broadcast 1, but the current"):
        defence.recover([fresh, late], [1.0, 1.0])
