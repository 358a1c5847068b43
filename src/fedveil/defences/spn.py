"""Secret polarization networks (SPN; Fan et al. 2020, arXiv 2006.11601), re-implemented because no code is public."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.checks import check_count, check_range
from fedveil.defences.encoding import copy_buffers
from fedveil.defences.interface import Samples, State, StateValue, read_state
from fedveil.defences.plain import P, Plain, PlainClient, PlainServer, PlainUpdate, compute_gradients
from fedveil.errors import AnalysisError, BadArgument
from fedveil.graph.export import export
from fedveil.graph.head import find_head
from fedveil.graph.inputs import Inputs, record_calls
from fedveil.scheme import Entropy, Loss
from fedveil.scheme.broadcast import MAX_SETTING
from fedveil.scheme.losses import sample_weights
from fedveil.scheme.outputs import compute_outputs

MAX_BITS = 2**10  # maximum length of a code: a client draws and stores one number per bit and feature
TOLERANCE = 1e-3  # tolerance on the sum of a row of probabilities


@dataclass(frozen=True, eq=False)
class PrivateHead:
    """A client's secrets: its head P_k (bits, features) and its codes T_k (classes, bits) of -1 and +1."""

    head: Tensor = field(repr=False)
    codes: Tensor = field(repr=False)

    def margin_gradient(self, features: Tensor, classes: Tensor, margin: float) -> Tensor:
        """Return the gradient of sum_j max(0, margin - v_j T[class, j]) with respect to v = P h, for each row h."""
        codes = self.codes[classes]
        return -codes * (features @ self.head.T * codes < margin)


@dataclass(frozen=True)
class Split:
    """The last Linear of the public network: its path, and the numbers of its inputs and outputs."""

    path: str
    features: int
    outputs: int

    @property
    def classes(self) -> int:
        """The number of classes; a single output represents two classes."""
        return max(2, self.outputs)


@dataclass(frozen=True, eq=False)
class SPNUpdate(PlainUpdate):
    """An update of the public network, and the gradient `step` of the private head, which is never sent."""

    step: Tensor = field(repr=False)


class SPN(Plain):
    """Each client has a private head that polarizes the features of the shared network (our re-implementation).

    Let h be the input of the model's last Linear, and u the model's outputs. Client k minimises

        loss(u, y) + weight * mean_i sum_j max(0, margin - v_ij T_k[y_i, j]),    v = P_k h.

    It sends the gradient with respect to the public network. It never sends its head P_k, which it updates by SGD in
    each round, or its codes T_k, which are fixed. The private loss does not affect the gradient of the last Linear.
    Predictions need only the public network. See docs/defences/spn.md for sources, cost and weaknesses.

    A target is a class index, a row of probabilities (its largest entry is the class), or, for one output, 0 or 1.

    Args:
        weight: weight of the private loss (alpha_2 in the paper; alpha_1 is 1). With 0, there is no defence.
        bits: number of outputs of the private head, at most 1024.
        margin: margin of the private loss (m in the paper).
        lr: learning rate of the private heads; pass the server's learning rate. The default is the learning rate of
            `Federation`'s default optimizer.
        seed: makes every client's secrets reproducible, for tests. By default, the operating system provides
            randomness.
    """

    name = "SPN (our re-implementation)"
    fusable = linear = False  # every client has its own head
    remote_settings = ("weight", "bits", "margin", "lr")  # heads and codes never leave the clients

    def __init__(
        self, weight: float = 0.1, bits: int = 32, margin: float = 1.0, lr: float = 1e-3, seed: int | None = None
    ) -> None:
        fix = "omit the argument to use its default"
        if check_count("SPN", "bits", bits, 1, fix) > MAX_BITS:
            raise BadArgument("SPN", f"bits must be at most {MAX_BITS}, got {bits}", fix)
        check_count("SPN", "seed", 0 if seed is None else seed, 0, fix)
        self.weight = check_range("SPN", "weight", weight, 0.0, MAX_SETTING, fix)
        self.margin = check_range("SPN", "margin", margin, 0.0, MAX_SETTING, fix)
        self.lr = check_range("SPN", "lr", lr, 0.0, MAX_SETTING, fix)
        self.bits, self.seed, self.repeatable = bits, seed, seed is not None

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server for a run; refuse a model that cannot be split into a body and a classifier."""
        find_split(model, example)
        return PlainServer(model)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "SPNClient":
        """Prepare clients for a run."""
        return SPNClient(self, find_split(model, example), model, loss)


class SPNClient(PlainClient):
    """Stores and trains each client's private head, and stores its codes."""

    def __init__(self, settings: SPN, split: Split, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self.split, self._settings = split, settings
        self._heads: dict[int, PrivateHead] = {}

    def step(self, broadcast: nn.Module, samples: Samples, client: int = 0) -> SPNUpdate:
        """Compute the gradients of the public network and of the client's head, which is drawn on first use."""
        buffers = copy_buffers(broadcast)
        with record_calls([broadcast.get_submodule(self.split.path)]) as calls:
            outputs = compute_outputs(broadcast, samples.inputs, buffers)
        hidden = calls[0].first_input
        with torch.no_grad():
            dense_targets = self.loss.dense(samples.targets, outputs)
            delta = self.loss.gradient(outputs, dense_targets) * sample_weights(outputs, samples.weights, self.loss)
            features = hidden.detach().reshape(-1, self.split.features)
            sample_shares = (torch.ones_like(outputs) * sample_weights(outputs, samples.weights)).reshape(
                len(features), -1
            )
            private_head = self._find_head(client, hidden)
            classes = find_classes(dense_targets, len(features), self.split.outputs, client)
            head_gradient = private_head.margin_gradient(features, classes, self._settings.margin) * (
                self._settings.weight * sample_shares[:, :1]
            )
            cotangents = delta, (head_gradient @ private_head.head).reshape(hidden.shape)
        gradients = compute_gradients(dict(broadcast.named_parameters()), (outputs, hidden), cotangents)
        return SPNUpdate(gradients, buffers, head_gradient.T @ features)

    def _find_head(self, client: int, reference: Tensor) -> PrivateHead:
        if client not in self._heads:
            seed = self._settings.seed
            entropy = Entropy() if seed is None else Entropy.for_tests(seed << 32 | client)
            self._heads[client] = draw_head(self.split, self._settings.bits, entropy)
        head = self._heads[client]
        self._heads[client] = PrivateHead(head.head.to(reference), head.codes.to(reference))
        return self._heads[client]

    def accumulate(self, broadcast: nn.Module, total: P | None, update: P) -> tuple[nn.Module, P]:
        """Sum both gradients; the head is updated only at the end of the round."""
        if isinstance(total, SPNUpdate) and isinstance(update, SPNUpdate):
            update = replace(update, step=total.step + update.step)
        return super().accumulate(broadcast, total, update)

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """Update the client's head, and return the update of the public network."""
        assert isinstance(update, SPNUpdate)
        private_head = self._find_head(client, update.step)
        self._heads[client] = PrivateHead(private_head.head - self._settings.lr * update.step, private_head.codes)
        return PlainUpdate(update.gradients, update.buffers)

    def state(self, client: int) -> State:
        """Return the client's head and codes, or an empty state before its first step."""
        return dict(vars(self._heads[client])) if client in self._heads else {}

    def restore(self, client: int, state: Mapping[str, StateValue]) -> None:
        """Continue with the head and codes in `state`."""
        head, codes = (read_state("SPN", state, name, Tensor) for name in ("head", "codes"))
        bits = self._settings.bits
        expected = (bits, self.split.features), (self.split.classes, bits)
        if (head.shape, codes.shape) != expected:
            message = (
                f"client {client}'s head and codes have shapes {(*head.shape,)} and {(*codes.shape,)}, not {expected}"
            )
            raise BadArgument("SPN", message, "resume with the model and the number of bits of the earlier run")
        self._heads[client] = PrivateHead(head, codes)


def find_split(model: nn.Module, example: Inputs) -> Split:
    """Find the last Linear, the layer to which a veil would add noise."""
    message = "SPN needs a model that ends with a Linear that is used only once"
    fix = "end the model with nn.Linear, move later operations into the loss, and check that torch.export can trace it"
    try:
        head, _ = find_head(model, export(model, example), example)
    except AnalysisError as error:
        raise BadArgument(error.where, message, fix) from error
    last_layer = model.get_submodule(head.path)
    if head.is_inner or not isinstance(last_layer, nn.Linear) or head.weight != f"{head.path}.weight".lstrip("."):
        raise BadArgument(head.path or type(model).__name__, message, fix)
    trainable_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable_names - {head.weight, head.bias}:
        message = "only the last Linear is trained, and SPN does not change its gradient"
        fix = "add a trainable hidden layer to the model"
        raise BadArgument(head.path or type(model).__name__, message, fix)
    return Split(head.path, model.get_parameter(head.weight).shape[1], head.outputs)


def find_classes(targets: Tensor, rows: int, outputs: int, client: int) -> Tensor:
    """Return the class of each row of features."""
    target_rows = targets.reshape(rows, -1) if targets.numel() % rows == 0 else targets.new_empty(rows, 0)
    if outputs == target_rows.shape[1] == 1 and ((target_rows == 0) | (target_rows == 1)).all():
        return target_rows[:, 0].long()
    if (
        outputs == target_rows.shape[1] > 1
        and (target_rows >= 0).all()
        and ((target_rows.sum(1) - 1).abs() < TOLERANCE).all()
    ):
        return target_rows.argmax(1)
    are_indices = (
        target_rows.shape[1] == 1 < outputs and not targets.is_floating_point()
    )  # the loss may be a user's function
    if are_indices and ((target_rows >= 0) & (target_rows < outputs)).all():
        return target_rows[:, 0].long()
    expected = "0 or 1" if outputs == 1 else f"class indices from 0 to {outputs - 1}, or rows of probabilities"
    message = f"client {client}'s targets must be {expected}, because SPN chooses codes by class"
    raise BadArgument("SPN", message, 'use defence "plain" or "veil" for other targets')


def draw_head(split: Split, bits: int, entropy: Entropy) -> PrivateHead:
    """Draw a head P with elements from N(0, 1 / features), and codes T of uniformly random signs."""
    normal_values = torch.from_numpy(entropy.normal(bits * split.features))
    head = normal_values.reshape(bits, split.features) / math.sqrt(split.features)
    signs = 1.0 - 2.0 * (entropy.words(split.classes * bits) & np.uint64(1))
    return PrivateHead(head, torch.from_numpy(signs).reshape(split.classes, bits))
