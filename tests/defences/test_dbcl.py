"""Double-blind learning: what a sketch is, what the server's step is a gradient of, and what clients never hold."""

import copy
import itertools
import types

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, worst
from tests.sessions import Session
from torch import nn
from torch.nn import functional as F

from fedveil import errors
from fedveil.defences import Plain, Samples
from fedveil.defences.dbcl import DBCL, Sketch, SketchedConv2d, SketchedLinear
from fedveil.federation import Federation
from fedveil.models import cnn, mlp, resnet
from fedveil.scheme.losses import CrossEntropy, Custom, SquaredError

EPS = torch.finfo(torch.float64).eps
NETS = {
    "mlp": (lambda: mlp(6, 4, hidden=10), (6,)),
    "cnn": (lambda: cnn(1, 4, width=4, size=8), (1, 8, 8)),
    "resnet, batch": (lambda: resnet(8, 3, 4, width=4), (3, 8, 8)),
    "resnet, none": (lambda: resnet(8, 3, 4, width=4, norm="none", shortcut="B"), (3, 8, 8)),
}
every_net = pytest.mark.parametrize(("build", "shape"), NETS.values(), ids=NETS)


def matrix(sketch):
    """S, (n, s)."""
    return sketch.down(torch.eye(sketch.fan_in, dtype=sketch.signs.dtype))


def drawn(n, q, seed=0):
    return Sketch.draw(n, q, np.random.default_rng(seed))


def every_sketch(n, q):
    """All equally likely ones: orders of the inputs, and signs of those that are kept."""
    s = n // q
    for order in itertools.permutations(range(n)):
        for signs in itertools.product((1.0, -1.0), repeat=s * q):
            yield Sketch(torch.tensor(order[: s * q]).view(q, s), torch.tensor(signs).double().view(q, s), n)


def prepared(model, inputs, loss=None, **options):
    return Session(DBCL(**{"seed": 0, **options}), model, inputs[:2], loss or SquaredError())


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def federation(build, shape, defence, *, clients=3, classes=None, records=24, optimizer=sgd, **options):
    """Clients with records that a network can learn."""
    parts = []
    for client in range(clients):
        inputs, noise = batch(shape, 4, samples=records, seed=client)
        rule = torch.randn(inputs[0].numel(), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
        targets = inputs.flatten(1) @ rule / inputs[0].numel() ** 0.5 + 0.1 * noise
        parts.append((inputs, targets.argmax(1) if classes else targets))
    return Federation(built(build), parts, defence, optimizer, batch_size=8, **options)


def rounding(model, *passes):
    """How far two float64 orders of the same gradient may part, relative to its size.

    Every module and the loss, on the way there and back, add at most half an eps for each term of the longest sum: over
    a unit's inputs, or over the samples and pixels of a batch. Twice that, for the two of them.
    """
    modules = [module for module in model.modules() if not module._modules]
    inputs = [m.weight[0].numel() for m in modules if isinstance(m, nn.Linear | nn.Conv2d)]
    longest = max(inputs + [x.numel() // x.shape[1] for x in passes])
    return 2 * (len(modules) + 1) * longest * EPS


# What a sketch is


@pytest.mark.parametrize(("n", "q"), [(4, 2), (7, 2), (9, 4), (3, 3), (200, 3)])
def test_a_sketch_puts_q_inputs_into_each_bucket(n, q):
    S = matrix(drawn(n, q))
    s = n // q
    assert torch.equal(S.T @ S, q * torch.eye(s, dtype=S.dtype))  # whole numbers: nothing is rounded
    assert set(S.unique().tolist()) <= {-1, 0, 1}
    assert S.abs().sum(0).eq(q).all()
    assert S.abs().sum(1).sort().values.tolist() == [0] * (n % q) + [1] * (s * q)


@pytest.mark.parametrize(("n", "q"), [(7, 2), (9, 4)])
def test_down_multiplies_by_s_and_up_by_its_transpose(n, q):
    sketch = drawn(n, q)
    S = torch.zeros(n, n // q, dtype=torch.float64)
    for row, bucket in np.ndindex(*sketch.inputs.shape):
        S[sketch.inputs[row, bucket], bucket] = sketch.signs[row, bucket]
    rows, small = torch.arange(3.0 * n).view(3, n).double(), torch.arange(3.0 * (n // q)).view(3, -1).double()
    assert torch.equal(sketch.down(rows), rows @ S)
    assert torch.equal(sketch.up(small), small @ S.T)


@pytest.mark.parametrize(("n", "q"), [(4, 2), (5, 2), (5, 3)])
def test_on_average_a_sketch_keeps_what_it_does_not_drop(n, q):
    total, count = torch.zeros(n, n, dtype=torch.float64), 0
    for sketch in every_sketch(n, q):
        S = matrix(sketch)
        total, count = total + S @ S.T, count + 1
    assert torch.equal(n * total, count * (n // q) * q * torch.eye(n, dtype=torch.float64))


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


# A sketched layer


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


def lifted(layer, sketch, x, small, bias):
    """The dense layer with the weight W~ S^T."""
    values = {"weight": (small @ matrix(sketch).to(x).T).view_as(layer.weight), "bias": bias}
    return torch.func.functional_call(layer, values, (x,))


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


@pytest.mark.parametrize("oracle", [literal, lifted])
@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_sketched_layer_is_the_dense_one_with_the_weight_spread_out(build, shape, q, oracle):
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
    found, true = passes(client, *given), passes(lambda *g: oracle(layer, sketch, *g), *given)
    # Both sum the same products, no sum longer than this: so they part by its length times eps, of the sum of sizes.
    positive = Sketch(sketch.inputs, sketch.signs.abs(), sketch.fan_in)
    sizes = passes(lambda *g: oracle(layer, positive, *g), *[tensor.abs() for tensor in given])
    terms = max(sketch.fan_in, delta.numel() // delta.shape[1]) + 4
    for a, b, size in zip(found, true, sizes, strict=True):
        assert ((a - b).abs() <= terms * EPS * size).all()


# What the server's step is a gradient of


def spread_out(model, broadcast, names):
    """The network with weights W S S^T, as a function of the parameters W."""

    def run(parameters, buffers, inputs):
        values = {**parameters, **buffers}
        for name in names:
            W, S = parameters[name], matrix(broadcast.network.get_submodule(name.rpartition(".")[0]).sketch)
            values[name] = (W.flatten(1) @ S @ S.T).view_as(W)
        return torch.func.functional_call(model, values, (inputs,))

    return run


def two_clients(build, shape, loss, **options):
    """A round of two clients with 30 and 10 records, and the same of the dense network: losses and buffers."""
    model = built(build)
    data = [batch(shape, 4, samples=5 + k, seed=k) for k in range(2)]
    if loss.name == "cross_entropy":
        data = [(x, y.argmax(1)) for x, y in data]
    defence = prepared(model, data[0][0], loss, **options)
    sent = defence.broadcast(model)
    updates = [defence.step(sent, Samples(*part)) for part in data]
    run, losses, buffers = spread_out(model, sent, defence.server.sketched), [], []
    for x, y in data:
        buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        outputs = run(dict(model.named_parameters()), buffers[-1], x)
        losses.append(loss.values(outputs, loss.dense(y, outputs)).mean())
    return model, data, defence, updates, losses, buffers


@every_net
@pytest.mark.parametrize("loss", [SquaredError(), CrossEntropy()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("q", [2, 4])
def test_a_round_is_the_gradient_of_the_sketched_loss_with_respect_to_the_weights(build, shape, loss, q):
    model, data, defence, updates, losses, _ = two_clients(build, shape, loss, q=q)
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


def test_statistics_of_norms_are_averaged_with_the_clients_weights():
    model, data, defence, updates, _, buffers = two_clients(*NETS["resnet, batch"], SquaredError())
    found = defence.recover(updates, [30.0, 10.0]).buffers
    assert set(found) == {name for name, _ in model.named_buffers()}
    for name, value in found.items():
        expected = 0.75 * buffers[0][name] + 0.25 * buffers[1][name]
        assert (value - expected).norm() <= rounding(model, *[x for x, _ in data]) * expected.norm()


def mean_gradient(monkeypatch, model, loss, inputs, targets, n, q):
    """Over all sketches, each through a round of its own."""
    defence, total, count = prepared(model, inputs, loss, q=q, skip_last=False), 0, 0
    for sketch in every_sketch(n, q):
        monkeypatch.setattr(Sketch, "draw", lambda *_, given=sketch: given)
        update = defence.step(defence.broadcast(model), Samples(inputs, targets))
        total, count = total + defence.recover([update], [1.0]).gradients["weight"], count + 1
    return total / count


@pytest.mark.parametrize(("n", "q"), [(4, 2), (5, 3)])
def test_where_the_loss_is_linear_the_mean_of_a_step_is_the_kept_share_of_the_plain_gradient(monkeypatch, n, q):
    model, (x, y) = built(lambda: nn.Linear(n, 3)), batch((n,), 3)
    found = mean_gradient(monkeypatch, model, Custom(lambda outputs, targets: (outputs * targets).sum(1)), x, y, n, q)
    plain = y.T @ x / len(x)
    draws = sum(1 for _ in every_sketch(n, q))
    size = y.abs().T @ x.abs() / len(x)
    assert ((found - n // q * q / n * plain).abs() <= (draws + len(x) + q) * q * EPS * size.sum(1, keepdim=True)).all()


def test_where_the_loss_is_squared_the_mean_of_a_step_has_a_penalty_on_large_weights(monkeypatch):
    n, q = 4, 2
    model, (x, y) = built(lambda: nn.Linear(n, 3, bias=False)), batch((n,), 3)
    found = mean_gradient(monkeypatch, model, SquaredError(), x, y, n, q)
    W, M = model.weight.detach(), x.T @ x / len(x)
    plain = W @ M - y.T @ x / len(x)
    together = (q - 1) / (n - 1)
    penalty = together * W @ (M + M.trace() * torch.eye(n, dtype=W.dtype) - 2 * M.diag().diag())
    draws = sum(1 for _ in every_sketch(n, q))
    size = W.abs().sum() * M.abs().sum() * q**2 + (y.abs().T @ x.abs()).sum()
    assert (found - plain - penalty).abs().max() <= (draws + len(x) + n) * EPS * size
    assert penalty.norm() > 0.1 * plain.norm()  # so the mean is not the plain gradient


# What a client holds


def reachable(thing):
    """Every tensor that can be reached from a thing, through attributes, containers, closures and views."""
    found, seen, todo = [], {}, [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | torch.dtype | torch.device | str | bytes):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            found.append(one)
            todo += [one.grad if one.is_leaf else None, one._base]
        elif isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            todo += one
        elif isinstance(one, types.FunctionType):
            todo += [cell.cell_contents for cell in one.__closure__ or ()]
        todo.append(getattr(one, "__self__", None))
        todo.append(getattr(one, "__dict__", None))
    return found


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
def test_a_client_can_reach_no_sketched_weight(build, shape):
    run = federation(build, shape, DBCL())
    run.fit(rounds=2)  # the server's parameters have gradients now
    model = run.model
    defence = Session(run.defence, model, batch(shape, 4)[0])
    model.extra = [
        dict(model.named_parameters())[name] for name in defence.server.sketched
    ]  # a reference beside the layer's
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
def test_the_view_answers_as_the_sketched_network_in_both_modes(build, shape, training):
    run = federation(build, shape, DBCL(seed=3))
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
    assert all(
        (seen[name] - value).double().norm() <= allowed * value.double().norm() for name, value in buffers.items()
    )


def test_a_view_is_its_owners_and_takes_its_sketch_along():
    run = federation(*NETS["resnet, batch"], DBCL())
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


# Training


def loss_before_and_after(run, rounds):
    """Of the server's network, on all records."""
    models = [copy.deepcopy(run.model).eval()]
    run.fit(rounds=rounds)
    models.append(copy.deepcopy(run.model).eval())
    with torch.no_grad():
        outputs = [model(run.shards.inputs) for model in models]
    return [float(run.loss.values(y, run.shards.targets).mean()) for y in outputs]


@every_net
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("clients", [1, 10])
def test_training_lowers_the_loss_of_the_network_without_sketches(build, shape, loss, clients):
    run = federation(
        build, shape, DBCL(seed=0), clients=clients, classes=loss == "cross_entropy", loss=loss, optimizer=adam
    )
    assert run.fused == (not any(isinstance(m, nn.BatchNorm2d) for m in run.model.modules()))
    before, after = loss_before_and_after(run, 20)
    assert after < before


@every_net
def test_sketched_weights_learn_by_themselves(build, shape):
    def others_frozen():
        model = build()
        sketched = prepared(model, torch.zeros(2, *shape)).server.sketched
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in sketched)
        return model

    before, after = loss_before_and_after(federation(others_frozen, shape, DBCL(seed=0), optimizer=adam), 20)
    assert after < before


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet, none"])
def test_fused_clients_give_what_single_ones_give(name):
    def gradients(fuse):
        run = federation(*NETS[name], DBCL(seed=0), fuse=fuse)
        assert run.fused == fuse
        return run.step().gradients

    model, inputs = built(NETS[name][0]), torch.empty(24, *NETS[name][1])
    assert worst(gradients(True), gradients(False)) < rounding(model, inputs)


def test_a_whole_shard_in_batches_is_one_gradient_under_one_sketch():
    whole = federation(*NETS["mlp"], DBCL(seed=0), whole_shard=True)
    found = whole.step().gradients
    model, data = built(NETS["mlp"][0]), (whole.shards.inputs, whole.shards.targets)
    defence = prepared(model, data[0])
    true = defence.recover([defence.step(defence.broadcast(model), Samples(*data))], [1.0]).gradients
    assert worst(found, true) < rounding(model, data[0])


def test_whole_shards_carry_statistics_on_from_batch_to_batch():
    run = federation(*NETS["resnet, batch"], DBCL(seed=0), clients=2, whole_shard=True)
    run.fit(rounds=2)
    counters = [b for name, b in run.model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counters
    assert all(int(counter) == 2 * 3 for counter in counters)


@pytest.mark.parametrize("name", ["mlp", "resnet, batch"])
def test_with_a_seed_a_resumed_run_ends_bit_for_bit_as_the_whole_one(tmp_path, name):
    def run():
        return federation(*NETS[name], DBCL(seed=5), optimizer=adam)

    whole = run()
    whole.fit(rounds=6)
    run().fit(rounds=3, folder=tmp_path)
    again = run()
    again.resume(tmp_path)
    assert again.defence_server.state() == {"number": 3}
    again.fit(rounds=6)
    other = federation(*NETS[name], DBCL(seed=6), optimizer=adam)
    other.fit(rounds=6)
    ends = [r.model.state_dict() for r in (whole, again, other)]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert not torch.equal(*[end[whole.defence_server.sketched[0]] for end in (ends[0], ends[2])])


def test_sketches_are_new_in_every_round_and_run_unless_seeded():
    def inputs(**options):
        model, (x, _) = built(lambda: mlp(64, 4)), batch((64,))
        defence = prepared(model, x, **options)
        return [defence.broadcast(model).network[0].sketch.inputs.flatten().tolist() for _ in range(3)]

    free = inputs(seed=None) + inputs(seed=None)
    assert len({tuple(order) for order in free}) == 6
    assert inputs(seed=1) == inputs(seed=1) != inputs(seed=2)
    assert len({tuple(order) for order in inputs(seed=1)}) == 3


def test_a_broadcast_leaves_the_model_and_the_global_generator_alone():
    model, (x, _) = built(NETS["resnet, batch"][0]), batch((3, 8, 8))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    defence = prepared(model, x)
    defence.broadcast(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_frozen_weights_are_sketched_and_get_no_gradient():
    model, (x, y) = built(NETS["mlp"][0]), batch((6,), 4)
    model[2].weight.requires_grad_(False)
    defence = prepared(model, x)
    sent = defence.broadcast(model)
    result = defence.recover([defence.step(sent, Samples(x, y))], [1.0])
    assert sent.network[2].weight.shape == (10, 5)
    assert set(result.gradients) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_divergence_names_the_gradient():
    run = federation(*NETS["mlp"], DBCL(), optimizer=lambda p: torch.optim.SGD(p, 1e200))
    with pytest.raises(errors.Diverged, match=r"gradient \S+ holds NaN or infinity"):
        run.fit(rounds=50)


# Which weights


class Backwards(nn.Module):
    """Registers its layers in another order than it calls them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.hidden = nn.Linear(4 * 16, 8)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.first = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(F.relu(self.hidden(x.flatten(1))))


def test_the_first_convolution_and_the_last_linear_are_those_that_are_called_so():
    model, (x, _) = built(Backwards), batch((2, 4, 4))
    assert prepared(model, x).server.sketched == ("hidden.weight", "second.weight")
    assert set(prepared(model, x, skip_first_conv=False).server.sketched) == {
        "first.weight",
        "hidden.weight",
        "second.weight",
    }
    assert set(prepared(model, x, skip_last=False).server.sketched) == {"head.weight", "hidden.weight", "second.weight"}
    assert prepared(model, x, skip=["hidden"]).server.sketched == ("second.weight",)
    assert prepared(model, x, skip="hidden.weight").server.sketched == ("second.weight",)


def test_the_first_linear_of_a_perceptron_is_sketched():
    assert prepared(built(NETS["mlp"][0]), batch((6,))[0]).server.sketched == ("0.weight", "2.weight", "4.weight")


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
        (lambda: nn.Linear(4, 3), {}, r"dbcl: nothing in this model would be sketched(?s:.*)Fix: .*skip_last=False"),
        (tied, {}, r"dbcl, 0.weight: several places share this weight(?s:.*)Fix: .*DBCL\(skip=\('0',\)\)"),
        (small_first, {}, r"dbcl, 1.weight: it has 1 inputs per unit, fewer than q = 2(?s:.*)Fix: .*skip=\('1',\)"),
        (circular, {}, r"dbcl, 2.weight: a convolution with padding_mode 'circular' has no sketch(?s:.*)Fix"),
        (bilinear, {}, r"dbcl, 0.weight: a Twice has no sketch, only the weights of Linear and Conv2d(?s:.*)Fix"),
        (tied, {"skip": ["5"]}, r"dbcl: skip names '5', and the model has no parameters there"),
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"q": 1},
            r"q must be a whole number of at least 2, got 1(?s:.*)Fix: use DBCL\(q=2\)",
        ),
        ({"q": 2.0}, r"q must be a whole number of at least 2, got 2\.0"),
        ({"q": True}, "q must be a whole number of at least 2, got True"),
        ({"seed": -1}, r"seed must be a whole number of at least 0, got -1(?s:.*)Fix: use DBCL\(seed=0\)"),
        ({"seed": 0.5}, r"seed must be a whole number of at least 0, got 0\.5"),
    ],
)
def test_arguments_without_meaning_are_refused(options, text):
    with pytest.raises(errors.BadArgument, match=f"dbcl: {text}"):
        DBCL(**options)


def test_late_updates_and_foreign_states_are_refused():
    model, (x, y) = built(NETS["mlp"][0]), batch((6,), 4)
    defence = prepared(model, x)
    late = defence.step(defence.broadcast(model), Samples(x, y))
    fresh = defence.step(defence.broadcast(model), Samples(x, y))
    with pytest.raises(
        errors.StaleUpdate, match="client 1: it answers broadcast 1, whose sketch is gone; the last one"
    ):
        defence.recover([fresh, late], [1.0, 1.0])
    with pytest.raises(errors.BadArgument, match="dbcl: the checkpoint is of another defence"):
        defence.server.restore({})
