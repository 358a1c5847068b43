"""A client's work (paper, Sec. 4.2): one forward pass and a few backward passes, whatever the network."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument, ModelMismatch
from fedveil.graph.inputs import Inputs, call, count
from fedveil.graph.layout import Inside, look_inside
from fedveil.graph.tail import AtLayer
from fedveil.scheme.losses import per_sample
from fedveil.scheme.messages import Broadcast, PublicHead, Tensors, Update
from fedveil.scheme.outputs import head_axis, slope
from fedveil.scheme.perceptron import backward, forward, links_of
from fedveil.scheme.terms import cotangents


def _check_architecture(model: nn.Module, broadcast: Broadcast) -> Inside:
    """Read the model, or refuse it if its tensors or modes differ from the broadcast's."""
    fix = "build the client's model with the code that built the server's"
    inside = look_inside(model)
    for sent, own in ((broadcast.parameters, inside.parameters), (broadcast.buffers, inside.buffers)):
        for name, value in sent.items():
            tensor = own.get(name)
            rows = broadcast.continued and sent is broadcast.buffers and value.is_floating_point()
            shape = value.shape[1:] if rows else value.shape
            if tensor is None or tensor.shape != shape:
                found = "nothing" if tensor is None else str(tuple(tensor.shape))
                raise ModelMismatch(name, f"the broadcast has {tuple(shape)}, the model {found}", fix)
    training = tuple([path for path, mode in inside.modes if mode])
    if training != broadcast.training:
        path = sorted(set(training) ^ set(broadcast.training))[0]
        mode = "train" if path in broadcast.training else "eval"
        fix = f"model.{mode}()" if not path else f"model.get_submodule({path!r}).{mode}()"
        raise ModelMismatch(path or type(model).__name__, f"the broadcast is for a model in {mode} mode here", fix)
    return inside


@contextmanager
def _filled(inside: Inside, values: Tensors) -> Iterator[None]:
    """Fill the model with other values, and restore its own; torch.func.functional_call without a second walk."""
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
    """The head with a row of ones, whose output is alpha: the sum of its inputs, plus 1 if its bias has noise."""
    weight = values[head.weight]
    shape = list(weight.shape)
    shape[head.dim] = 1
    grown = {head.weight: torch.cat([weight, weight.new_ones(shape)], head.dim)}
    if head.bias:
        grown[head.bias] = torch.cat([values[head.bias], weight.new_full((1,), float(head.masked_bias))])
    return values | grown


class _HeadReached(Exception):
    """The head's output is computed; what follows only reshapes it."""


def _forward(model: nn.Module, head: PublicHead | None, values: Tensors, inputs: Inputs) -> Tensor:
    """The model's outputs, or its head's outputs with alpha."""
    if head is None or head.tail == "alike":
        result: Tensor = call(model, inputs)
        return result
    seen: list[Tensor] = []

    def capture(output: Tensor) -> Tensor:
        seen.append(output)
        raise _HeadReached

    try:
        with AtLayer(values[head.weight], capture):
            call(model, inputs)
    except _HeadReached:
        pass
    return seen[0]


def _corrected(head: PublicHead, output: Tensor, numbers: Iterable[int]) -> Tensor:
    """The head's output for each of some candidates, as if it were the true offset, along the batch."""
    y, alpha = torch.split_with_sizes(output, [output.shape[head.axis] - 1, 1], head.axis)
    shape = [1] * y.dim()
    shape[head.axis] = -1
    noise = head.noise(y)
    return torch.cat([y - noise[number].view(shape) * alpha for number in numbers])


def client_step(
    model: nn.Module,
    broadcast: Broadcast,
    inputs: Inputs,
    targets: Tensor,
    weights: Tensor | None = None,
) -> Update:
    """Compute what a client uploads for a batch.

    Paper, Sec. 4.2: the perturbed gradient, sigma~_1 ... sigma~_m and beta, each averaged over the samples; for a loss
    other than squared error the gradient for each of the broadcast's candidates. Every one is a gradient of (y, alpha)
    with a pair of cotangents, so no per-sample Jacobian is formed.

    Args:
        model: gives the architecture; its values are neither used nor changed.
        broadcast: what the server sent.
        inputs: a batch as forward takes it: a tensor, a tuple of arguments or a dict of keyword arguments; on the
            model's device.
        targets: in the shape of the model's outputs, or class indices, depending on the loss.
        weights: of the samples, in place of 1 / samples: with weights |D_k| / (|D| samples_k), one step for the batches
            of several clients gives the same sum.

    Raises:
        ModelMismatch: the model's tensors or modes differ from the server's.
        BadArgument: an empty batch, or targets of the wrong shape.
    """
    if torch.is_inference_mode_enabled():
        raise BadArgument("client_step", "torch.inference_mode() allows no gradients", "call it outside of that mode")
    for device in {tensor.device.type for tensor in broadcast.parameters.values()}:
        if torch.is_autocast_enabled(device):
            what = f"torch.autocast is on for {device}: a veiled gradient would lose more digits than a plain one"
            raise BadArgument("client_step", what, "call it outside of torch.autocast")
    inside = _check_architecture(model, broadcast)
    samples = inputs.shape[0] if isinstance(inputs, Tensor) else count(inputs)
    if not samples or samples != targets.shape[0]:
        what = f"{samples} inputs and {targets.shape[0]} targets: there must be as many of each, at least 1"
        raise BadArgument("client_step", what)
    head = broadcast.head
    values = _with_alpha(head, broadcast.parameters) if head else broadcast.parameters
    links = links_of(model, inputs, values) if head and not head.within else None
    if head and links and isinstance(inputs, Tensor):
        with torch.no_grad():
            seen = forward(links, values, inputs)
            backs = cotangents(broadcast.loss, head, seen[-1], targets, weights)
            passes = backward(links, values, seen, backs, broadcast.trainable)
        buffers: Tensors = {}
    else:
        work = _Work(model, inside, broadcast, values, inputs, targets, weights)
        passes, buffers = _passes_within(work, head) if head and head.within else _passes(work)
    if head:
        for name, dim in ((head.weight, head.dim), (head.bias, 0)):
            if name in passes:
                passes[name] = passes[name].narrow(dim + 1, 0, passes[name].shape[dim + 1] - 1)
    return Update(broadcast.round, broadcast.model, samples, passes, buffers)


class _Work:
    """A batch and the model to run it through.

    Attributes:
        leaves: the tensors to differentiate, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: Inside,
        broadcast: Broadcast,
        values: Tensors,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None,
    ) -> None:
        self.model, self.inside, self.broadcast = model, inside, broadcast
        self.inputs, self.targets, self.weights = inputs, targets, weights
        self.values = {name: value.detach() for name, value in values.items()}
        self.leaves = {name: self.values[name].requires_grad_() for name in broadcast.trainable}

    def buffers(self, number: int = 0) -> Tensors:
        """Copies of the buffers; for a candidate, as its last batch left them."""
        sent = self.broadcast.buffers
        if self.broadcast.continued:
            sent = {name: value[number] if value.is_floating_point() else value for name, value in sent.items()}
        return {name: value.clone() for name, value in sent.items()}

    @contextmanager
    def filled(self, buffers: Tensors) -> Iterator[None]:
        """The model with the broadcast's values; gradients are recorded."""
        with torch.enable_grad(), _filled(self.inside, self.values | buffers):
            yield

    def room(self, passes: int) -> Tensors:
        """Memory for the passes."""
        return {name: leaf.new_empty((passes, *leaf.shape)) for name, leaf in self.leaves.items()}

    def back(self, room: Tensors, number: int, outputs: Tensor, cotangent: Tensor, *, last: bool) -> None:
        """One backward pass of autograd."""
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(outputs, leaves, cotangent, retain_graph=not last, allow_unused=True)
        for stack, gradient in zip(room.values(), found, strict=True):
            if gradient is None:
                stack[number].zero_()
            else:
                stack[number].copy_(gradient)


def _passes(work: _Work) -> tuple[Tensors, Tensors]:
    """Forward by the model's own code, and one backward pass per cotangent."""
    head, loss, buffers = work.broadcast.head, work.broadcast.loss, work.buffers()
    with work.filled(buffers):
        outputs = _forward(work.model, head, work.values, work.inputs)
        with torch.no_grad():
            backs = cotangents(loss, head, outputs, work.targets, work.weights)
        room = work.room(len(backs))
        for number, cotangent in enumerate(backs):
            work.back(room, number, outputs, cotangent, last=number == len(backs) - 1)
    return room, buffers


def _passes_within(work: _Work, head: PublicHead) -> tuple[Tensors, Tensors]:
    """Apply each candidate to the head's output, and run what follows forward and back."""
    count = len(head.candidates)
    room = work.room(count)
    if head.tail == "stacked":
        buffers = work.buffers()
        with work.filled(buffers):
            parts = _outputs_within(work, head, range(count)).chunk(count)
            for number, part in enumerate(parts):
                work.back(room, number, part, _delta(work, part), last=number == count - 1)
        return room, buffers
    started, kept = _random_state(work), []
    for number in range(count):
        _set_random_state(work, started)  # so that dropout drops the same units for every candidate
        buffers = work.buffers(number)
        with work.filled(buffers):
            outputs = _outputs_within(work, head, [number])
            work.back(room, number, outputs, _delta(work, outputs), last=True)
        kept.append(buffers)
    stacked = {
        name: torch.stack([own[name] for own in kept]) if value.is_floating_point() else value
        for name, value in buffers.items()
    }
    return room, stacked


def _outputs_within(work: _Work, head: PublicHead, numbers: Sequence[int]) -> Tensor:
    """The model's outputs for some candidates, along the batch."""
    with AtLayer(work.values[head.weight], lambda output: _corrected(head, output, numbers)) as layer:
        outputs: Tensor = call(work.model, work.inputs)
    if not layer.calls:
        fix = "build the client's model with the code that built the server's"
        raise ModelMismatch(head.path, "forward did not call the layer that is masked additively", fix)
    return outputs


def _delta(work: _Work, outputs: Tensor) -> Tensor:
    """The cotangent of the model's own outputs."""
    loss = work.broadcast.loss
    with torch.no_grad():
        found = slope(loss, outputs.detach(), work.targets, head_axis(work.model))
        return found * per_sample(loss, outputs, work.weights)


def _random_state(work: _Work) -> tuple[Tensor, Tensor | None]:
    device = work.broadcast.head.direction.device if work.broadcast.head else torch.device("cpu")
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(work: _Work, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None and work.broadcast.head:
        torch.cuda.set_rng_state(state[1], work.broadcast.head.direction.device)
