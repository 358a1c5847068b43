"""Perturb a model (paper, Sec. 4.1, "Parameter perturbation"), and keep the secrets of a run and of each broadcast.

The last functions predict the range of the next round's passes, which secure aggregation needs for its fixed-point
numbers.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.checks import suspend_autocast
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph.foreign_code import WRAPPER, find_original
from fedveil.graph.plan import Plan, check_model
from fedveil.scheme.broadcast import Broadcast, PublicHead, Update
from fedveil.scheme.decoys import Fit, count_decoys, draw_candidates
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.noise import Entropy, HeadNoise, NoiseSettings, Reals, UnitNoise, anchor
from fedveil.scheme.recover import Recovery, check_updates, recover, refuse_non_finite, smooth
from fedveil.scheme.result import Aggregate, recover_each
from fedveil.scheme.transform import BufferPool, Transform
from fedveil.wire import Tensors

MAX_SLOTS_AHEAD = 2**15  # maximum number of slots, over all rounds, for which noise is drawn in advance
MAX_ROUNDS_AHEAD = 16  # maximum number of rounds for which noise is drawn in advance


class MemoryOnly:
    """Base class of secrets that never leave the server's memory: they cannot be pickled, copied or printed."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        message = "cannot be pickled or copied: it never leaves the server's memory"
        raise TypeError(f"a {type(self).__name__} {message}")

    __reduce__ = __reduce_ex__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, redacted>"


class Perturbation(MemoryOnly):
    """A perturbed model and the secret needed to recover the gradient from updates, for one attempt at a round.

    Attributes:
        broadcast: the complete message to clients.
    """

    def __init__(self, broadcast: Broadcast, recovery: Recovery, pool: BufferPool) -> None:
        self.broadcast = broadcast
        self._recovery: Recovery | None = recovery
        self._pool = pool

    @property
    def recovery(self) -> Recovery:
        """The broadcast's secret; raises BadArgument after `release`."""
        if self._recovery is None:
            message = "the secret of this round has been released"
            raise BadArgument("recover", message, "recover the gradient before release(), or perturb the model again")
        return self._recovery

    def check(self, update: Update, position: int = 0) -> None:
        """Refuse an update that is not a reply to this broadcast or not finite; errors name client `position`."""
        check_updates(self.recovery, [update], position)
        refuse_non_finite(f"client {position}", update)

    def recover(self, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Aggregate:
        """Recover the weighted mean of the gradients that clients would have sent for the true model.

        It may be called any number of times before `release`. See `fedveil.scheme.recover.recover`.

        Args:
            updates: one update per client.
            weights: |D_k| of each client; by default, the number of samples in each update.
        """
        return recover(self.recovery, updates, weights)

    def recover_each(self, updates: Sequence[Update]) -> list[Aggregate | UpdateRefused]:
        """Recover each client's gradient separately; for a refused update, return the error."""
        return recover_each(lambda update: recover(self.recovery, [update], [1.0]), updates)

    def template(self) -> Update:
        """Return an update for this round on the meta device, with names, shapes and dtypes but without values."""
        return self.recovery.template()

    def release(self, *, reuse: bool = False) -> None:
        """Discard the secret; further calls have no effect.

        Args:
            reuse: whether later broadcasts may overwrite the memory of this broadcast's large tensors, which is safe
                only if they are no longer in use.
        """
        if reuse and self._recovery is not None and self._recovery.memory is not None:
            self._pool.return_memory(self._recovery.memory)
        self._recovery = None


@dataclass
class _Reserve:
    """A session's contents: noise drawn in advance or kept, fits for decoys, and memory to reuse."""

    process: int = field(default_factory=os.getpid)
    unused: list[UnitNoise] = field(default_factory=list, repr=False)
    fits: list[Fit] = field(default_factory=list, repr=False)
    kept_noise: tuple[UnitNoise, HeadNoise | None] | None = field(default=None, repr=False)
    pool: BufferPool = field(default_factory=BufferPool)


class VeilSession(MemoryOnly):
    """The server's secret state during a run. Each call to `perturb` draws new noise.

    A session may be used from several threads. It is empty in a forked process, so that processes never share noise.

    Args:
        plan: the result of `fedveil.analyse`.
        loss: the loss that clients minimise: a name, a loss, a torch loss module or a function (outputs, targets).
        settings: the amount of noise to draw.
        entropy: the source of random numbers, by default the operating system; `Entropy.for_tests(seed)` for tests.
    """

    def __init__(
        self, plan: Plan, loss: str | Loss | Function, settings: NoiseSettings, entropy: Entropy | None = None
    ) -> None:
        settings.check_groups(plan)
        self.plan, self.loss, self.settings = plan, find_loss(loss), settings
        self._decoys = count_decoys(settings, plan, self.loss)
        self._entropy, self._content = entropy or Entropy(), _Reserve()
        self.draws = 0  # number of times that kept noise was drawn, which is not secret

    @property
    def _reserve(self) -> _Reserve:
        """The session's contents, which are empty in a newly forked process."""
        if self._content.process != os.getpid():
            self.forget()
        return self._content

    def forget(self) -> None:
        """Discard noise that was drawn in advance or kept."""
        self._content = _Reserve()

    @suspend_autocast()
    def perturb(self, model: nn.Module) -> Perturbation:
        """Perturb a model with new noise; the model itself is not changed.

        Paper, Eq. (7)-(9): W^(l) = R(l) o W(l) with R(l)_ij = r(l)_i / r(l-1)_j, for every parameter and buffer; and
        W^(L) = R(L) o W(L) + R_a with R_a_ij = gamma_i r_a_i for the head.

        This differs from the paper in two ways. The head is sent as a base and a public offset, which contain the same
        information, so that a large gamma does not reduce precision; and the head's bias gets noise too.
        """
        plan, layout, reserve = self.plan, self.plan.layout, self._reserve
        units, head = self._draw(reserve)
        token = self._entropy.token()
        state = check_model(plan, find_original(model) if type(model).__name__ == WRAPPER else model)
        tensors = state.parameters | state.buffers
        public_head, coefficients = None, [1.0]
        # a diverged model may overflow here; the clients' updates then contain NaN or infinity
        with torch.no_grad(), np.errstate(all="ignore"):
            transform = Transform.from_noise(plan, units)
            values, memory = transform.apply(tensors, reserve.pool)
            if head is not None:
                public_head, coefficients = self._perturb_head(values, transform, head, reserve.fits)
        counters = {name: tensors[name].clone() for name in layout.counters}
        buffers = {entry.name: values.pop(entry.name) for entry in layout.buffers} | counters
        trainable = tuple([entry.name for entry in layout.trainable])
        training = tuple([path for path, mode in plan.modes if mode])
        values |= {entry.name: tensors[entry.name].detach() for entry in layout.local}
        content = self.loss, values, buffers, trainable, training, public_head, plan.form, plan.signature
        broadcast = Broadcast(token, layout.name, *content, output=plan.output, local=bool(layout.local))
        counter_specs = {name: (value.shape, value.dtype) for name, value in counters.items()}
        factor_bound, decoys = self.settings.multiplicative, bool(self._decoys)
        recovery = Recovery(plan, token, transform, coefficients, decoys, counter_specs, factor_bound, memory)
        return Perturbation(broadcast, recovery, reserve.pool)

    def _perturb_head(
        self, values: Tensors, transform: Transform, noise: HeadNoise, fits: list[Fit]
    ) -> tuple[PublicHead, list[float]]:
        """Replace the scaled head with its base, in place; return its public part and the coefficients for recovery.

        base = V + (d o r_a) 1^T with d = -A(V): base + (offset o r_a) 1^T is the paper's head, with gamma = offset + d.
        The offset is drawn instead of gamma, so that it reveals nothing about d. A bias that is large enough is
        treated as an additional column of V.
        """
        head, entropy = self.plan.head, self._entropy
        assert head is not None
        rows, bias = values[head.weight].movedim(head.dim, 0), values[head.bias] if head.bias else None
        matrix = rows.reshape(len(rows), -1)
        V: Reals = (matrix if bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)).cpu().double().numpy()
        if bias is not None and _is_bias_small(V):
            V, bias = V[:, :-1], None
        direction, partition = noise.direction.double().numpy(), noise.partition.numpy()
        d, false_offsets = -anchor(V, direction, partition, len(noise.offset)), []
        if self._decoys:
            factors = transform.find_factors(head.weight).movedim(head.dim, 0)[0].reshape(-1).cpu().double().numpy()
            if bias is not None and head.bias:
                factors = np.append(factors, float(transform.find_factors(head.bias)[0]))
            rows_by_group = (partition == np.arange(len(d))[:, None]) * direction
            d, *false_offsets = draw_candidates(
                fits, V, factors, rows_by_group, d, self._decoys, bias is not None, entropy
            )
        base = torch.from_numpy(_blur(V + (d[partition] * direction)[:, None], V, rows.dtype, entropy))
        rows.copy_(base[:, : matrix.shape[1]].reshape(rows.shape))
        if bias is not None:
            bias.copy_(base[:, -1])
        offsets, coefficients = np.empty((0, len(d))), _squared_error_coefficients(d, direction, partition)
        if self._decoys:  # the true offset is at a random index, which stays secret
            index = int(entropy.words(1)[0] % np.uint64(1 + len(false_offsets)))
            offsets = np.stack([*false_offsets[:index], d, *false_offsets[index:]])
            coefficients = [float(number == index) for number in range(len(offsets))]
        numbers = (noise.direction, noise.partition, torch.from_numpy(noise.offset), torch.from_numpy(offsets))
        r_a, groups, offset, candidates = (tensor.to(self.plan.layout.device) for tensor in numbers)
        layer = {**vars(head), "noisy_bias": bias is not None}
        return PublicHead(**layer, direction=r_a, partition=groups, offset=offset, candidates=candidates), coefficients

    def _draw(self, reserve: _Reserve) -> tuple[UnitNoise, HeadNoise | None]:
        if reserve.kept_noise is not None:
            units, head = reserve.kept_noise
            return units, head and head.renew(self.settings.additive, self._entropy)
        units, head = self._next_units(reserve), None
        if self.plan.head is not None:
            while (head := self.settings.draw_head(self.plan, units, self._entropy)) is None:
                units = self._next_units(reserve)
        if self.settings.keep_noise:
            reserve.kept_noise = units, head
            self.draws += 1
        return units, head

    def _next_units(self, reserve: _Reserve) -> UnitNoise:
        """Return unused noise. For small models, noise is drawn for several rounds at once, at little extra cost."""
        if self._entropy.for_tests_only:
            return self.settings.draw_units(self.plan, 1, self._entropy)[0]
        try:
            return reserve.unused.pop()  # atomic, so that no other thread uses it
        except IndexError:
            count = max(1, min(MAX_ROUNDS_AHEAD, MAX_SLOTS_AHEAD // len(self.plan.slots.unit)))
            result, *remaining = self.settings.draw_units(self.plan, count, self._entropy)
            reserve.unused.extend(remaining)
            return result


def _squared_error_coefficients(offset: Reals, direction: Reals, partition: NDArray[np.int64]) -> list[float]:
    """Return the coefficients of the passes: 1, -d_1 ... -d_m and v = |d o r_a|^2 (paper, Sec. 4.3)."""
    r = offset[partition] * direction
    return [1.0, *(-offset).tolist(), float(r @ r)]


def _is_bias_small(V: Reals) -> bool:
    """Return whether the bias (the last column) is so small that it would reveal the noise.

    For example, a zero bias plus noise equals the noise. A column that is smaller than the others by a factor
    of the square root of their number estimates the noise as well as all others combined.
    """
    squares = (V * V).sum(0)
    columns = len(squares) - 1
    return bool(squares[-1] * columns < np.partition(squares[:-1], columns // 2)[columns // 2])


def _blur(base: Reals, V: Reals, dtype: torch.dtype, entropy: Entropy) -> Reals:
    """Add a random fraction of the last digit of V to each element of the base.

    V is rounded to a grid. If the base has finer digits than V, base - (d o r_a) 1^T would otherwise lie on this grid
    only for the true d.
    """
    digit = np.spacing(np.abs(V).astype(np.float32)) if dtype == torch.float32 else np.spacing(np.abs(V))
    return base + digit * entropy.fractions(V.size).reshape(V.shape)


@torch.no_grad()
def _unscale(secret: Recovery, passes: Tensors) -> Tensors:
    """Multiply passes by R and restore the order of the true model; return them by name, with one row per pass."""
    transform, result = secret.transform, dict[str, Tensor]()
    for group in transform.group(secret.plan.layout.trainable):
        tensors = [passes[entry.name] for entry in group.entries]
        flat = torch.cat([rows.reshape(len(rows), -1) for rows in tensors], 1)
        transform.multiply(group, flat)
        rows = [transform.restore_order(group, row) for row in flat]
        result |= {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return result


def _find_factors(secret: Recovery) -> Tensors:
    """Return R for each trainable tensor, in the order of the true model."""
    layout = secret.plan.layout
    ones = torch.ones(1, dtype=layout.dtype, device=layout.device)
    result = _unscale(secret, {entry.name: ones.expand(1, *entry.shape) for entry in layout.trainable})
    return {name: rows[0] for name, rows in result.items()}


def predict_passes(secret: Recovery, update: Update, previous: Mapping[str, Tensor] | None) -> Tensors:
    """Predict the next round's passes, without its factors, from an update; `previous` is the last prediction."""
    scales = [_input_scale(secret) ** -power for power in _alpha_powers(secret)]
    result = {}
    for name, tensor in _unscale(secret, update.passes).items():
        scale = tensor.new_tensor(scales).view(-1, *[1] * (tensor.dim() - 1))
        result[name] = smooth(tensor * scale, previous[name] if previous else None)
    return result


def bound_passes(secret: Recovery, passes: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Bound the elements of each pass under a round's noise, given predictions from `predict_passes`.

    Passes change from round to round because units get new factors. The larger the factors may be, the more headroom
    passes get; terms that depend on the sum of the head's inputs get more headroom than others. With decoys, the true
    pass has a different index in every round, so all rows get the largest bound.
    """
    factors, head, result = _find_factors(secret), _input_scale(secret), {}
    headroom = secret.multiplicative**0.25
    for name, value in passes.items():
        rows = (value / factors[name]).abs().flatten(1).amax(1).tolist()
        powers = _alpha_powers(secret)
        sizes = [headroom * size * (head * headroom) ** power for size, power in zip(rows, powers, strict=True)]
        result[name] = [max(sizes)] * len(sizes) if secret.decoys else sizes
    return result


def _alpha_powers(secret: Recovery) -> list[int]:
    """Return the power of alpha, the sum of the head's inputs, in each pass: 1 in sigma~ and 2 in beta."""
    count = len(secret.coefficients)
    if secret.plan.head is None or secret.decoys:
        return [0] * count
    return [0, *[1] * (count - 2), 2]


def _input_scale(secret: Recovery) -> float:
    """Return the root mean square of the factors of the head's inputs, or 1 if there is no head."""
    head = secret.plan.head
    if head is None:
        return 1.0
    return float(secret.transform.find_factors(head.weight).double().reciprocal().square().mean().sqrt())


def bound_rounding(secret: Recovery, rounding: Mapping[str, Sequence[float]]) -> float:
    """Bound the norm of the gradient error caused by rounding the elements of each pass."""
    coefficients = [float(bool(c)) if secret.decoys else abs(c) for c in secret.coefficients]
    total = 0.0
    for name, factors in _find_factors(secret).items():
        error = sum(c * value for c, value in zip(coefficients, rounding[name], strict=True))
        total = math.hypot(total, error * float(torch.linalg.vector_norm(factors.double())))
    return total
