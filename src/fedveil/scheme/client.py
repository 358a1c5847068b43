"""Compute a client's update (paper, Sec. 4.2): one forward pass and a few backward passes, for any network.

A client computes cotangents from (y, alpha) and sends one gradient per cotangent; the server sums these *passes*,
weighted by secret coefficients::

    G = R o sum_k coefficient_k(secret) pass_k

Notation: y are the outputs of the veiled model, alpha is the sum of the head's inputs (plus 1 if it has a bias), r_a is
the public direction, I_s is the s-th group of outputs, and d is the secret offset: y_true = y - d alpha r_a.

Squared error has the paper's m + 2 terms. Any other loss has one pass per public *candidate* t: the gradient for d = t.
One of the candidates is d and the others are decoys, so one coefficient is 1 and all others are 0 (docs/losses.md).

For a stack of Linear and ReLU layers, all cotangents are propagated together: one product per layer computes the
gradients for all of them, and another computes the cotangents of the layer's input. This avoids call overhead, which
dominates the cost of small networks. The result equals autograd's up to rounding (tests/scheme/test_client.py).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from fedveil.checks import is_suspended, resume_autocast, suspend_autocast
from fedveil.errors import BadArgument, ModelMismatch
from fedveil.graph.export import attribute_failure
from fedveil.graph.foreign_code import WRAPPER, find_original, refuse_packing, run_eagerly
from fedveil.graph.head import INNER_TAILS
from fedveil.graph.inputs import Inputs, LayerOutputMode, call, change_recomputed, count, each
from fedveil.graph.outputs import choose_output
from fedveil.graph.plan import ModelState
from fedveil.graph.units import reshape_along
from fedveil.scheme.broadcast import CODE_FIX, Broadcast, PublicHead, Update, check_broadcast, check_inputs, select_row
from fedveil.scheme.losses import AUTOGRAD_LOSSES, CLASS_LOSSES, CrossEntropy, Loss, match_targets, sample_weights
from fedveil.scheme.outputs import head_axis, output_gradient
from fedveil.wire import Tensors

FORM_FIX = "pass inputs with the shapes and dtypes of the example that was analysed"
BACKWARD_FIX = "do not checkpoint the layer with additive noise or later layers, and replace x += y with x = x + y"
HEAD_NOT_RUN = "forward did not run the layer that has additive noise"


def _check_outputs(head: PublicHead, outputs: Tensor) -> None:
    """Refuse outputs of the head, including alpha, whose shape does not match the broadcast."""
    expected = len(head.direction) + 1
    if outputs.dim() <= max(head.axis, 0) or outputs.shape[head.axis] != expected:
        shape = tuple(outputs.shape)
        message = f"its outputs have shape {shape}, but the broadcast expects {expected - 1} on axis {head.axis}"
        raise ModelMismatch(head.path[:80], message, CODE_FIX)


def add_alpha(head: PublicHead, values: Tensors) -> Tensors:
    """Add a row of ones to the head, which computes alpha: the sum of the inputs, plus 1 if the bias has noise."""
    weight = values[head.weight]
    shape = list(weight.shape)
    shape[head.dim] = 1
    extended = {head.weight: torch.cat([weight, weight.new_ones(shape)], head.dim)}
    if head.bias:
        extended[head.bias] = torch.cat([values[head.bias], weight.new_full((1,), float(head.noisy_bias))])
    return values | extended


@suspend_autocast()
def client_step(
    model: nn.Module, broadcast: Broadcast, inputs: Inputs, targets: Tensor, weights: Tensor | None = None
) -> Update:
    """Compute a client's update for a batch.

    The update contains the perturbed gradient, sigma~_1 ... sigma~_m and beta (paper, Sec. 4.2), each averaged over the
    samples; for a loss other than squared error, it contains the gradient for each of the broadcast's candidates. Each
    is computed from a pair of cotangents of (y, alpha), without per-sample Jacobians. Under torch.autocast, the model's
    forward method runs in bfloat16; the update remains in the dtype of the broadcast.

    Args:
        model: a model of the same architecture; its values are neither used nor changed.
        broadcast: the server's message.
        inputs: a batch on the model's device: a tensor, or a tuple of arguments or a mapping of keyword arguments.
        targets: targets with the shape of the model's outputs, or class indices, depending on the loss.
        weights: the weight of each sample, by default 1 / samples. With weights |D_k| / (|D| samples_k), one call for
            the concatenated batches of several clients returns the weighted sum of their updates.

    Raises:
        ModelMismatch: the model's tensors or modes differ from those of the server's model.
        BadArgument: the batch is empty, or the targets have the wrong shape.
    """
    if torch.is_inference_mode_enabled():
        message = "torch.inference_mode() does not allow gradients"
        raise BadArgument("client_step", message, "call client_step outside torch.inference_mode()")
    if type(model).__name__ == WRAPPER:
        model = find_original(model)
    model = choose_output(model, broadcast.output) if broadcast.output else model
    state = check_broadcast(model, broadcast)
    samples = inputs.shape[0] if isinstance(inputs, Tensor) else count(inputs)
    if not samples or samples != targets.shape[0]:
        message = f"got {samples} inputs and {targets.shape[0]} targets; their numbers must be equal and at least 1"
        raise BadArgument("client_step", message)
    head, loss = broadcast.head, broadcast.loss
    values = add_alpha(head, broadcast.parameters) if head else broadcast.parameters
    may_batch = head and head.tail not in INNER_TAILS and not is_suspended()
    paths = find_layer_paths(model, inputs, values) if may_batch else None
    if head and paths and isinstance(inputs, Tensor):
        with torch.no_grad():
            activations = forward(paths, values, inputs)
            _check_outputs(head, activations[-1])
            output_cotangents = cotangents(loss, head, activations[-1], targets, weights)
            passes = backward(paths, values, activations, output_cotangents, broadcast.trainable)
        buffers: Tensors = {}
    else:
        check_inputs(model, broadcast, inputs)
        refuse_packing(type(model).__name__)
        run = _BatchRun(model, state, broadcast, values, inputs, targets, weights)
        run_candidates = head and _needs_tail(head, loss)
        with run_eagerly(model):
            passes, buffers = run.compute_candidates(head) if head and run_candidates else run.compute_passes(head)
    if head:
        for name, dim in ((head.weight, head.dim), (head.bias, 0)):
            if name in passes:
                passes[name] = passes[name].narrow(dim + 1, 0, passes[name].shape[dim + 1] - 1)
    return Update(broadcast.round, broadcast.model, samples, passes, buffers)


def _needs_tail(head: PublicHead, loss: Loss) -> bool:
    """Return whether clients must run the layers after the head for each candidate."""
    may_reshape = head.tail == "reshaped" or len(head.direction) == 1  # a single output may be squeezed
    return head.tail in INNER_TAILS or (may_reshape and isinstance(loss, AUTOGRAD_LOSSES + CLASS_LOSSES))


@dataclass(eq=False, repr=False)
class _BatchRun:
    """A batch and the model that processes it, using the model's forward method and autograd."""

    model: nn.Module
    state: ModelState
    broadcast: Broadcast
    values: Tensors
    inputs: Inputs
    targets: Tensor
    weights: Tensor | None

    def __post_init__(self) -> None:
        self.values = {name: value.detach() for name, value in self.values.items()}
        self.leaves = {name: self.values[name].requires_grad_() for name in self.broadcast.trainable}
        missing = {name: p.shape for name, p in self.state.parameters.items() if name not in self.values}
        if missing:  # forward should not read them, and must not see the client's values
            zero = next(iter(self.values.values())).new_zeros(())
            self.values |= {name: zero.expand(shape) for name, shape in missing.items()}

    def compute_passes(self, head: PublicHead | None) -> tuple[Tensors, Tensors]:
        """Run forward once and backward once per cotangent; return gradients and buffers."""
        buffers = self._copy_buffers()
        with self._load_values(buffers):
            outputs = self._run_to_head(head) if head and head.tail != "alike" else self._call()
            if head:
                _check_outputs(head, outputs)
            with torch.no_grad():
                output_cotangents = cotangents(self.broadcast.loss, head, outputs, self.targets, self.weights)
            result = self._allocate(len(output_cotangents))
            for index, cotangent in enumerate(output_cotangents):
                self._run_backward(result, index, outputs, cotangent, is_last=index == len(output_cotangents) - 1)
        return result, buffers

    def compute_candidates(self, head: PublicHead) -> tuple[Tensors, Tensors]:
        """Subtract each candidate from the head's output, and run the later layers; return gradients and buffers."""
        count, device = len(head.candidates), head.direction.device
        result = self._allocate(count)
        if head.tail == "stacked":
            buffers = self._copy_buffers()
            with self._load_values(buffers), self._run_candidates(head, range(count)) as outputs:
                if len(outputs) != count * len(self.targets):  # otherwise uninitialised rows would be sent
                    raise ModelMismatch(head.path[:80], "the layers after this one couple samples", CODE_FIX)
                for number, part in enumerate(outputs.chunk(count)):
                    self._run_backward(result, number, part, self._cotangent(part), is_last=number == count - 1)
            return result, buffers
        buffer_states = []
        for number in range(count):
            buffers = self._copy_buffers(number)
            same_dropout = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=number < count - 1)
            with same_dropout, self._load_values(buffers), self._run_candidates(head, [number]) as outputs:
                self._run_backward(result, number, outputs, self._cotangent(outputs), is_last=True)
            buffer_states.append(buffers)
        if head.tail in INNER_TAILS:
            for name in [name for name, value in buffers.items() if value.is_floating_point()]:
                buffers[name] = torch.stack([state[name] for state in buffer_states])
        return result, buffers

    def _call(self) -> Tensor:
        """Return the model's output; if forward fails, raise an error that names the module."""
        with attribute_failure(self.model, "its forward method fails on this batch", FORM_FIX), resume_autocast():
            return self._restore(call(self.model, each(Tensor.clone, self.inputs)))  # forward may change its inputs

    def _restore(self, output: Tensor) -> Tensor:
        """Cast an output that forward computed under autocast back to the broadcast's dtype."""
        return output.to(next(iter(self.values.values())).dtype) if is_suspended() else output

    def _copy_buffers(self, number: int = 0) -> Tensors:
        """Copy the broadcast's buffers; if the broadcast is continued, copy those of the given candidate."""
        buffers = self.broadcast.buffers
        buffers = select_row(buffers, number) if self.broadcast.continued else buffers
        return {name: value.clone() for name, value in buffers.items()}

    @contextmanager
    def _load_values(self, buffers: Tensors) -> Iterator[None]:
        """Use the broadcast's values temporarily, like torch.func.functional_call but without traversing the model."""
        values = self.values | buffers
        containers = self.state.containers
        replaced = [(container, name, values[key]) for key in values for container, name in containers[key]]
        tensors = [container[name] for container, name, _ in replaced]
        try:
            for container, name, value in replaced:
                container[name] = value
            with torch.enable_grad():
                yield
        finally:
            for (container, name, _), tensor in zip(replaced, tensors, strict=True):
                container[name] = tensor

    def _allocate(self, passes: int) -> Tensors:
        return {name: leaf.new_empty((passes, *leaf.shape)) for name, leaf in self.leaves.items()}

    def _run_backward(self, stacks: Tensors, number: int, outputs: Tensor, cotangent: Tensor, *, is_last: bool) -> None:
        """Run backward for one pass, and write the gradients to its row of `stacks`."""
        leaves = list(self.leaves.values())
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if outputs.requires_grad:
            with attribute_failure(self.model, "its backward pass fails", BACKWARD_FIX):
                gradients = torch.autograd.grad(outputs, leaves, cotangent, retain_graph=not is_last, allow_unused=True)
        for stack, gradient in zip(stacks.values(), gradients, strict=True):
            if gradient is None:
                stack[number].zero_()
            else:
                stack[number].copy_(gradient)

    def _run_to_head(self, head: PublicHead) -> Tensor:
        """Return the head's outputs, including alpha, without running later layers, which only reshape them."""
        captured: list[Tensor] = []

        def capture(output: Tensor) -> Tensor:
            captured.append(self._restore(output))
            raise _HeadReached

        with suppress(_HeadReached), LayerOutputMode(self.values[head.weight], capture):
            self._call()
        if not captured:
            raise ModelMismatch(head.path[:80], HEAD_NOT_RUN, CODE_FIX)
        return captured[0]

    @contextmanager
    def _run_candidates(self, head: PublicHead, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Yield the model's outputs, with each of these candidates as the true offset, stacked along the batch axis."""

        def correct(output: Tensor) -> Tensor:
            _check_outputs(head, output)
            y, alpha = torch.split_with_sizes(self._restore(output), [output.shape[head.axis] - 1, 1], head.axis)
            noises, axis = head.noise(y), head.axis % y.dim()
            return torch.cat([y - reshape_along(noises[number], axis, y.dim()) * alpha for number in numbers])

        with LayerOutputMode(self.values[head.weight], correct) as layer:
            outputs = self._call()
        if not layer.calls:
            raise ModelMismatch(head.path[:80], HEAD_NOT_RUN, CODE_FIX)
        with change_recomputed(self.model, self.values[head.weight], correct):
            yield outputs

    def _cotangent(self, outputs: Tensor) -> Tensor:
        loss = self.broadcast.loss
        with torch.no_grad():
            result = output_gradient(loss, outputs.detach(), self.targets, head_axis(self.model))
            return result * sample_weights(outputs, self.weights, loss)


class _HeadReached(BaseException):
    """The end of a forward pass at the head. It is not an Exception, which forward might catch."""


def cotangents(
    loss: Loss, head: PublicHead | None, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return one cotangent per pass: of the outputs or, with a head, of (y, alpha). `weights` override 1 / samples."""
    outputs = outputs.detach()
    if head is None:
        return (output_gradient(loss, outputs, targets) * sample_weights(outputs, weights, loss)).unsqueeze(0)
    axis = head.axis
    if axis != 1 and outputs.dim() > 2 and isinstance(loss, CrossEntropy) and loss.average_positions:
        message = "torch.nn.CrossEntropyLoss expects classes on axis 1, but these outputs have them on the last axis"
        fix = 'use loss="cross_entropy", which sums over positions, or return outputs.movedim(-1, 1) from forward'
        raise BadArgument("loss", message, fix)
    if axis != -1:
        outputs = outputs.movedim(axis, -1)
        if targets.is_floating_point() and targets.dim() == outputs.dim() and not isinstance(loss, AUTOGRAD_LOSSES):
            targets = targets.movedim(axis, -1)
    if head.has_candidates:
        result = _candidate_passes(loss, head, outputs, targets, weights)
    else:
        result = _squared_error_passes(head, outputs, targets, weights)
    return result if axis == -1 else result.movedim(-1, axis + 1)


def _squared_error_passes(head: PublicHead, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the cotangents of (y, alpha) for the m + 2 passes: G^, sigma~_1 ... sigma~_m, beta (paper, Theorem 2).

    The loss is half the squared distance, summed over outputs and averaged over samples (paper, Eq. 6)::

        G^        (delta, 0)                                delta = (y - target) / samples
        sigma~_s  (alpha r_a|I_s, r_a|I_s . delta)
        beta      (0, alpha)
    """
    r_a, m = head.direction, head.groups
    weight = sample_weights(outputs, weights)
    y, alpha = torch.split_with_sizes(outputs * weight, [len(r_a), 1], -1)
    delta = y - match_targets(y, targets) * weight
    rows = [r_a] if m == 1 else [r_a * (head.partition == s) for s in range(m)]
    sigmas = [torch.cat([alpha * row, delta @ row.unsqueeze(1)], -1) for row in rows]
    return torch.stack([F.pad(delta, (0, 1)), *sigmas, F.pad(alpha, (len(r_a), 0))])


def _candidate_passes(loss: Loss, head: PublicHead, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the cotangents of (y, alpha) for each candidate t: (delta, -(t o r_a) . delta).

    delta is the derivative of the loss at y - alpha (t o r_a). Classes are on the last axis of `outputs`, but a user's
    function receives them on the axis on which the model returns them.
    """
    noise = head.noise(outputs)
    y, alpha = torch.split_with_sizes(outputs, [noise.shape[1], 1], -1)
    targets = loss.dense(targets, y)
    rows = noise.view(len(noise), *[1] * (outputs.dim() - 1), -1)
    corrected = torch.addcmul(y, rows, alpha, value=-1)
    if isinstance(loss, AUTOGRAD_LOSSES):  # these may couple samples, or depend on their number
        gradients = [loss.gradient(row.movedim(-1, head.axis), targets).movedim(head.axis, -1) for row in corrected]
        delta = torch.stack(gradients)
    else:
        delta = loss.gradient(corrected, targets)
    delta = delta * sample_weights(outputs, weights, loss)
    projection = delta.reshape(len(noise), -1, noise.shape[1]) @ noise.unsqueeze(2)
    return torch.cat([delta, -projection.view(*delta.shape[:-1], 1)], -1)


def find_layer_paths(model: nn.Module, inputs: object, values: Collection[str]) -> list[str | None] | None:
    """Return the path of each Linear and None for each ReLU; return None if the model has any other layers."""
    if type(model) is not nn.Sequential or "forward" in vars(model) or getattr(inputs, "ndim", 0) != 2:
        return None
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    paths: list[str | None] = []
    for path, module in model._modules.items():
        if type(module) not in (nn.Linear, nn.ReLU) or module._forward_hooks or module._forward_pre_hooks:
            return None
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{path}.{name}" not in values:
                return None  # a module or tensor that is used twice is listed only under its first name
        paths.append(path if type(module) is nn.Linear else None)
    return None if model._forward_hooks or model._forward_pre_hooks else paths


def forward(paths: Sequence[str | None], values: Tensors, inputs: Tensor) -> list[Tensor]:
    """Return the inputs, followed by the output of each layer."""
    activations = [inputs]
    for path in paths:
        x = activations[-1]
        output = torch.relu(x) if path is None else F.linear(x, values[f"{path}.weight"], values.get(f"{path}.bias"))
        activations.append(output)
    return activations


def backpropagate(
    paths: Sequence[str | None], values: Tensors, activations: Sequence[Tensor], cotangents: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the path of each Linear, the cotangents of its output, and its input, from the last layer to the first."""
    cotangent, (passes, samples, _) = cotangents, cotangents.shape
    for number in reversed(range(len(paths))):
        path = paths[number]
        if path is None:
            cotangent.mul_(activations[number + 1].sign())  # the sign of a ReLU's output, 0 or 1, is its derivative
            continue
        yield path, cotangent, activations[number]
        if number:
            weight = values[f"{path}.weight"]
            rows, columns = weight.shape  # len is slower
            cotangent = (cotangent.view(passes * samples, rows) @ weight).view(passes, samples, columns)


def backward(
    paths: Sequence[str | None],
    values: Tensors,
    activations: Sequence[Tensor],
    cotangents: Tensor,
    trainable: Collection[str],
) -> Tensors:
    """Return the gradients of the trainable parameters, with one row for each cotangent of the last output."""
    result, passes = dict[str, Tensor](), cotangents.shape[0]
    for path, cotangent, inputs in backpropagate(paths, values, activations, cotangents):
        weight, bias = f"{path}.weight", f"{path}.bias"
        if weight in trainable:
            result[weight] = torch.bmm(cotangent.transpose(1, 2), inputs.expand(passes, -1, -1))
        if bias in trainable:
            result[bias] = cotangent.sum(1)
    return {name: result[name] for name in trainable}
