"""A client's work (paper, Sec. 4.2): one forward pass and a few backward passes, whatever the network."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument, ModelMismatch
from fedveil.graph.inputs import Inputs, call, count
from fedveil.graph.layout import Inside, look_inside
from fedveil.scheme.chain import backward, forward, links_of
from fedveil.scheme.messages import Broadcast, PublicHead, Tensors, Update
from fedveil.scheme.terms import cotangents


def _check_architecture(model: nn.Module, broadcast: Broadcast) -> Inside:
    """Read the model, or refuse it if its tensors or modes are not those that were veiled."""
    fix = "build the client's model with the code that built the server's"
    inside = look_inside(model)
    for sent, own in ((broadcast.parameters, inside.parameters), (broadcast.buffers, inside.buffers)):
        for name, value in sent.items():
            tensor = own.get(name)
            if tensor is None or tensor.shape != value.shape:
                found = "nothing" if tensor is None else str(tuple(tensor.shape))
                raise ModelMismatch(name, f"the broadcast has {tuple(value.shape)}, the model {found}", fix)
    training = tuple([path for path, mode in inside.modes if mode])
    if training != broadcast.training:
        path = sorted(set(training) ^ set(broadcast.training))[0]
        mode = "train" if path in broadcast.training else "eval"
        fix = f"model.{mode}()" if not path else f"model.get_submodule({path!r}).{mode}()"
        raise ModelMismatch(path or type(model).__name__, f"the broadcast is for a model in {mode} mode here", fix)
    return inside


@contextmanager
def _filled(inside: Inside, values: Tensors) -> Iterator[None]:
    """The model with other values in place of its own, which come back at the end whatever happens.

    What torch.func.functional_call does, without a second walk over the model.
    """
    homes = [(home, name, value) for key, value in values.items() for home, name in inside.homes[key]]
    own = [home[name] for home, name, _ in homes]
    try:
        for home, name, value in homes:
            home[name] = value
        yield
    finally:
        for (home, name, _), mine in zip(homes, own, strict=True):
            home[name] = mine


def _with_alpha(head: PublicHead, values: Tensors) -> Tensors:
    """The head with one more output of ones, which is alpha: the sum of its inputs, plus 1 if it has a bias."""
    weight = values[head.weight]
    shape = list(weight.shape)
    shape[head.dim] = 1
    grown = {head.weight: torch.cat([weight, weight.new_ones(shape)], head.dim)}
    if head.bias:
        grown[head.bias] = torch.cat([values[head.bias], weight.new_ones(1)])
    return values | grown


class _HeadReached(Exception):
    """The head's output is there; what follows only reshapes it."""


def _forward(model: nn.Module, head: PublicHead | None, inputs: Inputs) -> Tensor:
    """The model's outputs, or its head's outputs and alpha beside them."""
    if head is None or head.last:
        result: Tensor = call(model, inputs)
        return result
    seen: list[Tensor] = []

    def capture(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(output)
        raise _HeadReached

    handle = model.get_submodule(head.path).register_forward_hook(capture)
    try:
        call(model, inputs)
    except _HeadReached:
        pass
    finally:
        handle.remove()
    return seen[0]


def client_step(
    model: nn.Module,
    broadcast: Broadcast,
    inputs: Inputs,
    targets: Tensor,
    weights: Tensor | None = None,
) -> Update:
    """Compute what a client uploads for a batch.

    Paper, Sec. 4.2: the perturbed gradient, sigma~_1 ... sigma~_m and beta, each averaged over the samples; for a loss
    other than squared error the gradient at each of the broadcast's nodes. Every one is a gradient of (y, alpha) with a
    pair of cotangents, so no per-sample Jacobian is formed.

    Args:
        model: gives the architecture; its values are ignored and, when the call ends, what they were.
        broadcast: what the server sent.
        inputs: a batch as forward takes it: a tensor, a tuple of arguments or a dict of keyword arguments; on the
            model's device.
        targets: as the broadcast's loss wants them; in the shape of the model's outputs, or class indices.
        weights: of the samples, in place of 1 / samples: with weights |D_k| / (|D| samples_k) the batches of several
            clients that share a broadcast go through one step, to the same sum.

    Raises:
        ModelMismatch: the model has other tensors, or another mode, than the one that was veiled.
        BadArgument: an empty batch, or targets of the wrong shape.
    """
    if torch.is_inference_mode_enabled():
        raise BadArgument("client_step", "torch.inference_mode() allows no gradients", "call it outside of that mode")
    for device in {tensor.device.type for tensor in broadcast.parameters.values()}:
        if torch.is_autocast_enabled(device):
            what = f"torch.autocast is on for {device}: a veiled gradient would lose more digits than a plain one does"
            raise BadArgument("client_step", what, "call it outside of torch.autocast")
    inside = _check_architecture(model, broadcast)
    samples = inputs.shape[0] if isinstance(inputs, Tensor) else count(inputs)
    if not samples or samples != targets.shape[0]:
        what = f"{samples} inputs and {targets.shape[0]} targets: want the same number above 0"
        raise BadArgument("client_step", what)
    head, trainable = broadcast.head, broadcast.trainable
    values = _with_alpha(head, broadcast.parameters) if head else broadcast.parameters
    links = links_of(model, inputs, values)
    if head and links and isinstance(inputs, Tensor):
        with torch.no_grad():
            seen = forward(links, values, inputs)
            passes = backward(
                links, values, seen, cotangents(broadcast.loss, head, seen[-1], targets, weights), trainable
            )
        buffers = {}
    else:
        buffers = {name: value.clone() for name, value in broadcast.buffers.items()}
        passes = _passes(model, inside, broadcast, values | buffers, inputs, targets, weights)
    if head:
        for name, dim in ((head.weight, head.dim), (head.bias, 0)):
            if name in passes:
                passes[name] = passes[name].narrow(dim + 1, 0, passes[name].shape[dim + 1] - 1)
    return Update(broadcast.round, broadcast.model, samples, passes, buffers)


def _passes(
    model: nn.Module,
    inside: Inside,
    broadcast: Broadcast,
    values: Tensors,
    inputs: Inputs,
    targets: Tensor,
    weights: Tensor | None,
) -> Tensors:
    """Forward by the model's own code, and one backward pass of autograd for each cotangent."""
    head, names = broadcast.head, broadcast.trainable
    values = {name: value.detach() if name in broadcast.parameters else value for name, value in values.items()}
    leaves = [values[name].requires_grad_() for name in names]
    with torch.enable_grad(), _filled(inside, values):
        outputs = _forward(model, head, inputs)
    with torch.no_grad():
        backs = cotangents(broadcast.loss, head, outputs, targets, weights)
    last = len(backs) - 1
    passes = {name: leaf.new_empty((last + 1, *leaf.shape)) for name, leaf in zip(names, leaves, strict=True)}
    for number, cotangent in enumerate(backs):
        found = torch.autograd.grad(outputs, leaves, cotangent, retain_graph=number < last, allow_unused=True)
        for stack, gradient in zip(passes.values(), found, strict=True):
            if gradient is None:
                stack[number].zero_()
            else:
                stack[number].copy_(gradient)
    return passes
