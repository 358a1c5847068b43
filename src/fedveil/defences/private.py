"""Differential privacy for clients, on top of any other defence (see docs/defences/privacy.md)."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedveil.checks import check_range
from fedveil.defences.encoding import copy_buffers, split_vector
from fedveil.defences.interface import (
    AnyClient,
    AnyDefence,
    AnyRound,
    B,
    Defence,
    DefenceRound,
    DefenceServer,
    State,
    StateValue,
    U,
    read_state,
)
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph.inputs import Inputs, each
from fedveil.privacy.accounting import Accountant, Members, check_delta, import_library
from fedveil.privacy.mechanism import add_noise, clip_vector, make_grid, quantise
from fedveil.scheme import Aggregate, Entropy, Loss
from fedveil.scheme.outputs import compute_outputs
from fedveil.wire import Tensors

SMALLEST, LARGEST = 1e-30, 1e30  # bounds on `clip` and `noise`, so that squares and products do not overflow in float64


class PrivateDefence(Defence[B, U]):
    """Base class of defences that add differential privacy to another defence.

    Args:
        inner: the other defence.
        accountant: counts the rounds of all runs that use this object.
        entropy: source of random numbers, by default the operating system; `Entropy.for_tests(seed)` repeats them, so
            that nothing is private.
    """

    durable = True
    fusable = False

    def __init__(self, inner: AnyDefence, accountant: Accountant, entropy: Entropy | None) -> None:
        self.inner, self.accountant, self.entropy = inner, accountant, entropy or Entropy()
        self.local_training = inner.local_training
        self.name = f"{inner.name}+dp"
        self.repeatable = self.entropy.for_tests_only or inner.repeatable

    @abstractmethod
    def wrap(self, inner: AnyRound, model: nn.Module, members: Members) -> DefenceRound[B, U]:
        """Wrap a round of the inner defence in a private round."""

    @abstractmethod
    def settings(self) -> Mapping[str, float | str]:
        """Return the settings that must not change during a run, because the accounting depends on them."""

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "PrivateServer[B, U]":
        """Prepare the inner server; refuse a model whose buffers depend on the clients' data."""
        if changing_tensors := find_mutated_tensors(model, example):
            message = f"{changing_tensors[0]} depends on the clients' data, but is not clipped or protected by noise"
            fix = "use GroupNorm or LayerNorm instead of BatchNorm (--norm none for a ResNet), or model.eval()"
            if changing_tensors[0].startswith("parameter"):
                fix = "remove the code in forward that changes this parameter, such as max_norm of an Embedding"
            raise BadArgument("privacy", message, fix)
        return PrivateServer(self, self.inner.server(model, example, loss))

    def client_view(self, model: nn.Module, broadcast: B) -> nn.Module:
        """Return the model as a client of the inner defence receives it."""
        return self.inner.client_view(model, broadcast)


class PrivateServer(DefenceServer[B, U]):
    """The inner server with an accountant."""

    accountant: Accountant

    def __init__(self, defence: PrivateDefence[B, U], inner: DefenceServer[B, U]) -> None:
        self.defence, self.inner, self.plan, self.accountant = defence, inner, inner.plan, defence.accountant

    @property
    def draws(self) -> int:  # type: ignore[override]
        """The number of times that the inner server has drawn persistent noise."""
        return self.inner.draws

    @property
    def has_budget(self) -> bool:  # type: ignore[override]
        """Whether one more round stays within the budget."""
        return self.accountant.has_budget

    def start_round(self, model: nn.Module, members: Members = None) -> DefenceRound[B, U]:
        """Start a round of the inner server, and wrap it in a private round."""
        return self.defence.wrap(self.inner.start_round(model, members), model, members)

    def state(self) -> State:
        """Return the inner server's state, the settings, and the number of rounds so far."""
        return {"inner": self.inner.state(), **self.defence.settings(), **self.accountant.state()}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`; refuse a state with different settings."""
        for name, setting in self.defence.settings().items():
            saved_value = read_state("privacy", state, name, type(setting))
            if saved_value != setting:
                message = f"previous rounds used {name} = {saved_value}, not {setting}"
                raise BadArgument("privacy", message, "resume with the settings of the previous rounds")
        self.inner.restore(read_state("privacy", state, "inner", dict))
        self.accountant.restore(read_state("privacy", state, "rounds", int), read_state("privacy", state, "own", dict))


class PrivateRound(DefenceRound[B, U]):
    """A round of the inner defence, with noise added to its result."""

    def __init__(self, defence: PrivateDefence[B, U], inner: AnyRound, members: Members) -> None:
        self.inner, self.broadcast, self._members = inner, inner.broadcast, members
        self._accountant, self._entropy = defence.accountant, defence.entropy

    def recover_each(self, updates: Sequence[U]) -> list[Aggregate | UpdateRefused]:
        """Raise an error, because individual updates contain too little or no noise."""
        raise BadArgument("privacy", "only noisy sums are recovered, not individual updates", "set limits=None")

    def check_exact(self, model: nn.Module, inputs: Inputs, targets: Tensor | None) -> None:
        """Compare the gradients of the inner defence, without noise."""
        self.inner.check_exact(model, inputs, targets)

    def release(self, *, reuse: bool = False) -> None:
        """Discard the secret of the inner round."""
        self.inner.release(reuse=reuse)


class Private(PrivateDefence[B, U]):
    """Differential privacy for clients: their gradients are clipped, and noise is added to the sum.

        g_k   client k's gradient, recovered by the inner defence from k's update alone
        c_k = g_k min(1, clip / |g_k|),  |.| over all parameters together
        G   = (sum_k c_k + noise) / K,  K the number of clients in the round

    The noise is discrete Gaussian on a fine grid, with standard deviation noise x clip (`fedveil.privacy.mechanism`).

    Every client has weight 1 / K instead of |D_k| / |D|, which would reveal how many records it has.

    Guarantees: |c_k| <= clip, even after rounding (test_no_contribution_is_longer_than_clip). The accountant's epsilon
      therefore bounds how much can be learned about a client's data from the models after all rounds, even if all
      other clients collude. docs/defences/privacy.md defines the terms.
    Not covered: the server, which sees g_k, and the figures "dp_clipped" and "error", which contain no noise.

    A model whose buffers depend on the data (BatchNorm in training mode) is refused, because noise does not protect
    them. The server's buffers do not change.

    A round's `error` is the error of the inner defence, averaged over clients with weights |c_k|; it does not include
    the noise. The figures are the means of the inner defence's figures, "dp_clipped" (the fraction of clients that
    were clipped) and "epsilon" (spent so far).

    Args:
        inner: any other defence.
        clip: maximum norm of a client's contribution.
        noise: noise multiplier (standard deviation of the noise on the sum / clip). With 0, gradients are clipped, but
            there is no guarantee.
        delta: the delta for which epsilon is computed; choose it far below 1 / number of clients.
        budget: the maximum epsilon that a run may spend; by default, unlimited.
        entropy: source of random numbers, by default the operating system; `Entropy.for_tests(seed)` repeats them, so
            that nothing is private.
    """

    def __init__(
        self,
        inner: Defence[B, U],
        clip: float,
        noise: float,
        *,
        delta: float = 1e-5,
        budget: float | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        if inner.dp_clip is not None:
            raise BadArgument("Private", f"{inner.name} is already private", "wrap a defence only once")
        self.dp_clip = self.clip = check_range("Private", "clip", clip, SMALLEST, LARGEST, "use clip=1.0")
        self.noise = check_range("Private", "noise", noise, 0, LARGEST, "use noise=1.0; with 0, there is no guarantee")
        self.delta = check_delta("Private", delta)
        if noise:
            import_library()  # raises an error if dp-accounting is not installed
        super().__init__(inner, Accountant(self.noise, self.delta, budget=budget), entropy)
        self.clippable, self.largest_factor = inner.clippable, inner.largest_factor

    @property
    def base(self) -> Defence[B, U]:
        """The inner defence, which defines the messages."""
        return self.inner

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> AnyClient:
        """Prepare clients of the inner defence."""
        return self.inner.client(model, example, loss)

    def wrap(self, inner: AnyRound, model: nn.Module, members: Members) -> "ClientPrivateRound[B, U]":
        """Return a round that clips gradients and adds noise."""
        return ClientPrivateRound(self, inner, members)

    def arguments(self) -> dict[str, object]:
        """Return the inner defence, the noise and the budget."""
        return {**super().arguments(), "budget": self.accountant.budget}

    def settings(self) -> dict[str, float]:
        """Return the clipping norm and the noise multiplier."""
        return {"clip": self.clip, "noise": self.noise}


class ClientPrivateRound(PrivateRound[B, U]):
    """Clips the gradient recovered from each client's update, and adds noise to the sum."""

    def __init__(self, defence: Private[B, U], inner: DefenceRound[B, U], members: Members) -> None:
        super().__init__(defence, inner, members)
        self._clip, self._noise = defence.clip, defence.noise

    def recover(self, updates: Sequence[U], weights: Sequence[float]) -> Aggregate:
        """Clip and sum the clients' gradients, add noise, and divide by the number of clients; ignore `weights`."""
        measurements = []
        for result in self.inner.recover_each(updates):
            if isinstance(result, UpdateRefused):
                raise result
            measurements.append(result)
        return self.combine(measurements)

    @property
    def base(self) -> DefenceRound[B, U]:
        """The inner defence's round."""
        return self.inner

    def combine(self, results: Sequence[Aggregate]) -> Aggregate:
        """Clip and sum the gradients, add noise, and divide by the number of clients."""
        if not results:
            raise BadArgument("Private", "a round needs at least one update")
        reference = results[0].gradients
        vectors = [torch.cat([result.gradients[name].reshape(-1).double() for name in reference]) for result in results]
        clipped_vectors = [
            clip_vector(gradient, self._clip, f"client {position}") for position, gradient in enumerate(vectors)
        ]
        gradients = self._add_noise(
            torch.stack([vector for vector, _, _ in clipped_vectors]).sum(0), len(results), reference
        )
        keys = results[0].figures
        figures = {key: sum(result.figures.get(key, 0.0) for result in results) / len(results) for key in keys}
        figures["dp_clipped"] = sum(was_clipped for _, _, was_clipped in clipped_vectors) / len(results)
        norm = sum(norm for _, norm, _ in clipped_vectors)
        error = sum(result.error * norm for result, (_, norm, _) in zip(results, clipped_vectors, strict=True))
        return Aggregate(gradients, {}, error / norm if norm else 0.0, figures | self._privacy_figures())

    def finish_sum(self, mean: Aggregate, total: Tensors, clients: int) -> Aggregate:
        """Add noise to a sum from secure aggregation, for which clients have clipped their gradients.

        The sum is not rounded to the model's dtype first: the rounding error could exceed the margin of the noise.
        """
        vector = torch.cat([total[name].to(gradient.device).reshape(-1) for name, gradient in mean.gradients.items()])
        gradients = self._add_noise(vector, clients, mean.gradients)
        return Aggregate(gradients, {}, mean.error, {**mean.figures, **self._privacy_figures()}, mean.notes)

    def _privacy_figures(self) -> dict[str, float]:
        return {"epsilon": self._accountant.epsilon()} if self._noise else {}

    def _add_noise(self, total: Tensor, clients: int, reference: Mapping[str, Tensor]) -> Tensors:
        """Add noise to a sum of gradients, and divide it by the number of clients.

        The round counts for its members if all of them are in the sum, and otherwise for all clients. It is counted
        before the noise is drawn, in case the process is interrupted.
        """
        is_complete = self._members is not None and len(self._members) == clients
        self._accountant.count(self._members if is_complete else None)
        if self._noise:
            grid = make_grid(self._noise, self._clip, len(total))
            total = add_noise(quantise(total, grid), self._entropy) * grid.unit
        return split_vector(total / clients, reference)


def find_mutated_tensors(model: nn.Module, example: Inputs) -> list[str]:
    """Return the buffers and parameters that a forward pass would change or write to, without changing them."""
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers, dtype = copy_buffers(model), next(model.parameters()).dtype
    inputs = each(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, example)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        compute_outputs(model, inputs, parameters | buffers)
    changing_buffers = [
        f"buffer {name}" for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])
    ]
    changing_parameters = [
        name
        for name, parameter in model.named_parameters()
        if parameters[name]._version or not torch.equal(parameter, parameters[name])
    ]
    return changing_buffers + [f"parameter {name}" for name in changing_parameters]
