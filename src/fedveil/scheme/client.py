"""A client's work (paper, Sec. 4.2): one forward pass and a few backward passes, whatever the network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument, ModelMismatch
from fedveil.graph.inputs import Inputs, call, count
from fedveil.graph.layout import Inside, look_inside
from fedveil.graph.tail import AtLayer
from fedveil.scheme.losses import per_sample
from fedveil.scheme.messages import SAME_CODE, Broadcast, PublicHead, Update, match_model
from fedveil.scheme.outputs import head_axis, slope
from fedveil.scheme.perceptron import backward, find_links, forward
from fedveil.scheme.terms import cotangents
from fedveil.wire import Tensors

NOT_CALLED = "forward did not call the layer that is masked additively"


def check_broadcast(model: nn.Module, broadcast: Broadcast) -> Inside:
    """Read the model, or refuse it if its tensors or modes differ from the broadcast's.

    Parameters that forward does not read are not sent; all buffers are.
    """
    inside = look_inside(model)
    buffers = broadcast.buffers
    if broadcast.continued:
        buffers = {name: value[0] if value.is_floating_point() else value for name, value in buffers.items()}
    match_model(inside, broadcast.parameters, buffers, complete=False)
    training = tuple([path for path, mode in inside.modes if mode])
    if training != broadcast.training:
        _refuse_modes(model, training, broadcast.training)
    return inside


def _refuse_modes(model: nn.Module, own: Sequence[str], sent: Sequence[str]) -> NoReturn:
    differing = sorted(set(own) ^ set(sent))
    if not differing:
        raise ModelMismatch("broadcast", "it lists modules in training mode twice or in another order", SAME_CODE)
    path = differing[0][:80]
    mode = "train" if differing[0] in sent else "eval"
    fix = f"model.{mode}()" if not path else f"model.get_submodule({path!r}).{mode}()"
    raise ModelMismatch(path or type(model).__name__, f"the broadcast is for a model in {mode} mode here", fix)


def _check_outputs(head: PublicHead, outputs: Tensor) -> None:
    """Refuse outputs of the head, with alpha, that are not where the broadcast says."""
    wanted = len(head.direction) + 1
    if outputs.dim() <= max(head.axis, 0) or outputs.shape[head.axis] != wanted:
        what = f"its outputs are {tuple(outputs.shape)}, and the broadcast has {wanted - 1} of them on axis {head.axis}"
        raise ModelMismatch(head.path[:80], what, SAME_CODE)


def _with_alpha(head: PublicHead, values: Tensors) -> Tensors:
    """The head with a row of ones, whose output is alpha: the sum of its inputs, plus 1 if its bias has noise."""
    weight = values[head.weight]
    shape = list(weight.shape)
    shape[head.dim] = 1
    grown = {head.weight: torch.cat([weight, weight.new_ones(shape)], head.dim)}
    if head.bias:
        grown[head.bias] = torch.cat([values[head.bias], weight.new_full((1,), float(head.masked_bias))])
    return values | grown


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
    inside = check_broadcast(model, broadcast)
    samples = inputs.shape[0] if isinstance(inputs, Tensor) else count(inputs)
    if not samples or samples != targets.shape[0]:
        what = f"{samples} inputs and {targets.shape[0]} targets: there must be as many of each, at least 1"
        raise BadArgument("client_step", what)
    head = broadcast.head
    values = _with_alpha(head, broadcast.parameters) if head else broadcast.parameters
    links = find_links(model, inputs, values) if head and not head.within else None
    if head and links and isinstance(inputs, Tensor):
        with torch.no_grad():
            seen = forward(links, values, inputs)
            _check_outputs(head, seen[-1])
            backs = cotangents(broadcast.loss, head, seen[-1], targets, weights)
            passes = backward(links, values, seen, backs, broadcast.trainable)
        buffers: Tensors = {}
    else:
        work = _Work(model, inside, broadcast, values, inputs, targets, weights)
        passes, buffers = work.passes_within(head) if head and head.within else work.passes(head)
    if head:
        for name, dim in ((head.weight, head.dim), (head.bias, 0)):
            if name in passes:
                passes[name] = passes[name].narrow(dim + 1, 0, passes[name].shape[dim + 1] - 1)
    return Update(broadcast.round, broadcast.model, samples, passes, buffers)


@dataclass(eq=False, repr=False)
class _Work:
    """A batch, and the model to run it through by its own code and autograd."""

    model: nn.Module
    inside: Inside
    broadcast: Broadcast
    values: Tensors
    inputs: Inputs
    targets: Tensor
    weights: Tensor | None

    def __post_init__(self) -> None:
        self.values = {name: value.detach() for name, value in self.values.items()}
        self.leaves = {name: self.values[name].requires_grad_() for name in self.broadcast.trainable}
        unsent = {name: own.shape for name, own in self.inside.parameters.items() if name not in self.values}
        if unsent:  # forward does not read them; should it, the client's own values are not what it finds
            zero = next(iter(self.values.values())).new_zeros(())
            self.values |= {name: zero.expand(shape) for name, shape in unsent.items()}

    def passes(self, head: PublicHead | None) -> tuple[Tensors, Tensors]:
        """Forward, and one backward pass per cotangent."""
        buffers = self._buffers()
        with self._filled(buffers):
            outputs = self._reach(head) if head and head.tail != "alike" else call(self.model, self.inputs)
            if head:
                _check_outputs(head, outputs)
            with torch.no_grad():
                backs = cotangents(self.broadcast.loss, head, outputs, self.targets, self.weights)
            room = self._room(len(backs))
            for number, cotangent in enumerate(backs):
                self._back(room, number, outputs, cotangent, last=number == len(backs) - 1)
        return room, buffers

    def passes_within(self, head: PublicHead) -> tuple[Tensors, Tensors]:
        """Apply each candidate to the head's output, and run what follows forward and back."""
        count, device = len(head.candidates), head.direction.device
        room = self._room(count)
        if head.tail == "stacked":
            buffers = self._buffers()
            with self._filled(buffers):
                outputs = self._outputs(head, range(count))
                if len(outputs) != count * len(self.targets):  # parts without an output would be sent as they are
                    raise ModelMismatch(head.path[:80], "what follows it does not keep samples apart", SAME_CODE)
                parts = outputs.chunk(count)
                for number, part in enumerate(parts):
                    self._back(room, number, part, self._delta(part), last=number == count - 1)
            return room, buffers
        left = []
        for number in range(count):
            buffers = self._buffers(number)
            repeat = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=number < count - 1)
            with repeat, self._filled(buffers):  # so that dropout drops the same units for every candidate
                outputs = self._outputs(head, [number])
                self._back(room, number, outputs, self._delta(outputs), last=True)
            left.append(buffers)
        stacked = {
            name: torch.stack([own[name] for own in left]) if value.is_floating_point() else value
            for name, value in buffers.items()
        }
        return room, stacked

    def _buffers(self, number: int = 0) -> Tensors:
        """Copies of the buffers; for a candidate, as its last batch left them."""
        sent = self.broadcast.buffers
        if self.broadcast.continued:
            sent = {name: value[number] if value.is_floating_point() else value for name, value in sent.items()}
        return {name: value.clone() for name, value in sent.items()}

    @contextmanager
    def _filled(self, buffers: Tensors) -> Iterator[None]:
        """The model with the broadcast's values; torch.func.functional_call without a second walk."""
        values = self.values | buffers
        homes = [(home, name, value) for key, value in values.items() for home, name in self.inside.homes[key]]
        own = [home[name] for home, name, _ in homes]
        try:
            for home, name, value in homes:
                home[name] = value
            with torch.enable_grad():
                yield
        finally:
            for (home, name, _), mine in zip(homes, own, strict=True):
                home[name] = mine

    def _room(self, passes: int) -> Tensors:
        return {name: leaf.new_empty((passes, *leaf.shape)) for name, leaf in self.leaves.items()}

    def _back(self, room: Tensors, number: int, outputs: Tensor, cotangent: Tensor, *, last: bool) -> None:
        leaves = list(self.leaves.values())
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if outputs.requires_grad:
            found = torch.autograd.grad(outputs, leaves, cotangent, retain_graph=not last, allow_unused=True)
        for stack, gradient in zip(room.values(), found, strict=True):
            if gradient is None:
                stack[number].zero_()
            else:
                stack[number].copy_(gradient)

    def _reach(self, head: PublicHead) -> Tensor:
        """The head's outputs with alpha; what follows only reshapes them, and is not run."""
        seen: list[Tensor] = []

        def capture(output: Tensor) -> Tensor:
            seen.append(output)
            raise _HeadReached

        with suppress(_HeadReached), AtLayer(self.values[head.weight], capture):
            call(self.model, self.inputs)
        if not seen:
            raise ModelMismatch(head.path[:80], NOT_CALLED, SAME_CODE)
        return seen[0]

    def _outputs(self, head: PublicHead, numbers: Sequence[int]) -> Tensor:
        """The model's outputs for some candidates, each as if it were the true offset, along the batch."""

        def correct(output: Tensor) -> Tensor:
            _check_outputs(head, output)
            y, alpha = torch.split_with_sizes(output, [output.shape[head.axis] - 1, 1], head.axis)
            shape = [1] * y.dim()
            shape[head.axis] = -1
            noise = head.noise(y)
            return torch.cat([y - noise[number].view(shape) * alpha for number in numbers])

        with AtLayer(self.values[head.weight], correct) as layer:
            outputs: Tensor = call(self.model, self.inputs)
        if not layer.calls:
            raise ModelMismatch(head.path[:80], NOT_CALLED, SAME_CODE)
        return outputs

    def _delta(self, outputs: Tensor) -> Tensor:
        loss = self.broadcast.loss
        with torch.no_grad():
            found = slope(loss, outputs.detach(), self.targets, head_axis(self.model))
            return found * per_sample(loss, outputs, self.weights)


class _HeadReached(Exception):
    pass
