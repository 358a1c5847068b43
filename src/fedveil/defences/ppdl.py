"""PPDL (Shokri and Shmatikov, CCS 2015) in synchronous rounds: clients clip, select and add noise to their gradients.

See docs/defences/ppdl.md for differences from the paper, cost and weaknesses.
"""

import hashlib
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.checks import check_choice, check_fraction, check_range, is_number
from fedveil.defences.encoding import count_bytes, split_vector, trainable_tensors
from fedveil.defences.interface import LocalTraining, State, StateValue, read_state
from fedveil.defences.plain import AnyPlainRound, Plain, PlainClient, PlainCodec, PlainRound, PlainServer, PlainUpdate
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Aggregate, Loss
from fedveil.scheme.broadcast import MAX_SETTING
from fedveil.wire import Packed, Tensors, Values, add_prefix

MEDIAN_ROUNDS = 100
KEY_SIZE = 16  # key size in bytes; torch.Generator uses only 32 bits of its seed, which are easy to guess
SETTINGS = {"sel": {"fraction": 0.1}, "noise": {"sigma": 1e-2}, "both": {"fraction": 0.1, "sigma": 1e-2}}


@dataclass(repr=False, eq=False)
class _PPDLState:
    """A client's private state: its noise key, the number of draws so far, and the norms of its first gradients."""

    key: bytes
    draws: int = 0
    norms: list[float] = field(default_factory=list)

    def draw_normal(self, count: int) -> Tensor:
        """Draw standard normal values; every call uses a new Philox stream with the same 128-bit key."""
        self.draws += 1
        stream = np.random.Philox(key=int.from_bytes(self.key, "little"), counter=self.draws << 192)
        return torch.from_numpy(np.random.Generator(stream).standard_normal(count))


@dataclass(frozen=True)
class Measurement:
    """The difference between an upload and the true gradient, measured and used only within this process."""

    gradient_norm: float  # norm of the true gradient
    error_norm: float  # norm of the difference between upload and gradient
    noise: float  # standard deviation of the noise
    rms: float  # root mean square of the values to which the noise was added
    clipped: bool | None  # None if clipping is disabled
    sent_bytes: int | None  # size of the selected values and their indices or bitmap; None if all values are sent


@dataclass(frozen=True, eq=False)
class PPDLUpdate(PlainUpdate):
    """A clipped, sparsified and noisy gradient, and a measurement that is never sent."""

    measurement: Measurement | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type["PPDLUpdate"], tuple[Tensors, Tensors]]:
        return PPDLUpdate, (self.gradients, self.buffers)  # the measurement must not leave this process


class PPDL(Plain):
    """Clients clip their gradients, select the largest elements and add noise to these, in this order.

        1. clip      g <- g min(1, bound / |g|), |g| over the whole gradient
        2. select    set all but the max(1, round(fraction n)) largest of |g_1| ... |g_n| to 0; among equal values, the
                     first in the order of the model's parameters are kept
        3. noise     g_j <- g_j + N(0, sigma^2) for every selected g_j

    With clip=None, fraction=1 or sigma=0, the corresponding step is skipped. Buffers are sent unchanged. A gradient
    with NaN or infinity is not clipped, and the server refuses it.

    With clip="median", a client's bound is the median of its gradient norms in the first 100 rounds in which it took
    part, or in all rounds so far if there were fewer. Norms of 0 are ignored. No additional messages are sent.

    A round's `error` is sum_k w_k |upload_k - g_k| / sum_k w_k |g_k|. Its figures are "noise_over_rms" (sigma over the
    root mean square of the values it is added to) and "clipped" (the fraction of clients that were clipped). These
    values are never sent, so they are available only if server and clients share this object. Otherwise, the error is
    0.

    Args:
        fraction: fraction of a gradient's elements that a client uploads.
        sigma: standard deviation of the noise, which does not provide meaningful differential privacy.
        clip: maximum norm of a client's gradient, "median", or None to disable clipping.
        seed: makes the noise reproducible, for tests. By default, the operating system provides randomness.
        local_epochs: as for `fedveil.defences.Plain`; the change of the model takes the place of the gradient.
        local_lr: as for `fedveil.defences.Plain`.
        local_batch: as for `fedveil.defences.Plain`.
        local_momentum: as for `fedveil.defences.Plain`.
    """

    name = "ppdl"
    fusable = linear = False
    remote_settings = ("fraction", "sigma", "clip", *LocalTraining.NAMES)

    def __init__(
        self,
        fraction: float = 0.1,
        sigma: float = 0.0,
        clip: float | str | None = None,
        *,
        seed: int | None = None,
        local_epochs: int | None = None,
        local_lr: float | None = None,
        local_batch: int | None = None,
        local_momentum: float | None = None,
    ) -> None:
        self.fraction = check_fraction("PPDL", "fraction", fraction, "use fraction=1 to upload the whole gradient")
        self.sigma = check_range("PPDL", "sigma", sigma, 0.0, MAX_SETTING, "use sigma=0 to add no noise")
        if clip not in (None, "median") and not (is_number(clip) and 0 < clip <= MAX_SETTING):
            message = f"clip must be a norm above 0, 'median' or None, got {clip!r}"
            raise BadArgument("PPDL", message, "use clip=None to leave gradients unclipped")
        if seed is not None and type(seed) is not int:
            raise BadArgument("PPDL", f"seed must be an int or None, got {seed!r}", "omit seed except in tests")
        self.clip = clip if isinstance(clip, str | None) else float(clip)
        self.seed, self.repeatable = seed, seed is not None
        self._set_local_training("PPDL", local_epochs, local_lr, local_batch, local_momentum)

    @classmethod
    def from_setting(
        cls,
        setting: str = "sel",
        *,
        fraction: float | None = None,
        sigma: float | None = None,
        seed: int | None = None,
        local_epochs: int | None = None,
        local_lr: float | None = None,
        local_batch: int | None = None,
        local_momentum: float | None = None,
    ) -> "PPDL":
        """Return a preset: "sel" only selects, "noise" clips at the median and adds noise, and "both" does all three.

        `fraction` defaults to 0.1 and cannot be set for "noise"; `sigma` defaults to 1e-2 and cannot be set for "sel".
        """
        values = dict(SETTINGS[check_choice("PPDL.from_setting", "setting", setting, SETTINGS)])
        for name, value in (("fraction", fraction), ("sigma", sigma)):
            if value is not None and name not in values:
                message = f"setting {setting!r} has no {name}, got {value!r}"
                raise BadArgument("PPDL.from_setting", message, f'use PPDL.from_setting("both", {name}={value!r})')
            if value is not None:
                values[name] = value
        clip = "median" if "sigma" in values else None
        result = cls(
            values.get("fraction", 1.0),
            values.get("sigma", 0.0),
            clip,
            seed=seed,
            local_epochs=local_epochs,
            local_lr=local_lr,
            local_batch=local_batch,
            local_momentum=local_momentum,
        )
        result.name = f"ppdl-{setting}"
        return result

    @property
    def codec(self) -> "PPDLCodec":
        """The encoding of the model, the selected elements and the buffers."""
        return PPDLCodec(self.fraction)

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server for a run."""
        return PlainServer(model, round_type=PPDLRound)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "PPDLClient":
        """Prepare clients for a run."""
        return PPDLClient(self, model, loss)


class PPDLClient(PlainClient):
    """Clips gradients, selects elements and adds noise; stores each client's noise key and first norms."""

    def __init__(self, settings: PPDL, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self._settings = settings
        self._states: dict[int, _PPDLState] = {}

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """Clip and sparsify the client's gradient and add noise; elements that are not selected become 0."""
        fraction, sigma = self._settings.fraction, self._settings.sigma
        if fraction == 1 and self._settings.clip is None and not sigma:
            return update
        gradient = torch.cat([g.reshape(-1) for g in update.gradients.values()])
        gradient_norm = _norm(gradient)
        bound = self._bound(client, gradient_norm)
        is_clipped = bound < gradient_norm < math.inf
        clipped_gradient = gradient * (bound / gradient_norm) if is_clipped else gradient
        count = max(1, round(fraction * len(gradient)))
        selection = select_largest(clipped_gradient, count) if count < len(gradient) else None
        values = clipped_gradient if selection is None else clipped_gradient[selection]
        rms = _norm(values) / math.sqrt(count)
        if sigma:
            values = values + sigma * self._find_state(client).draw_normal(count).to(gradient)
        result = values if selection is None else torch.zeros_like(gradient).masked_scatter_(selection, values)
        sent_bytes = (
            count * gradient.element_size() + min(4 * count, math.ceil(len(gradient) / 8)) if fraction < 1 else None
        )
        has_bound = self._settings.clip is not None
        measurement = Measurement(
            gradient_norm, _norm(result - gradient), sigma, rms, is_clipped if has_bound else None, sent_bytes
        )
        return PPDLUpdate(split_vector(result, update.gradients), update.buffers, measurement)

    def _find_state(self, client: int) -> _PPDLState:
        if client not in self._states:
            seed = self._settings.seed
            test_key = hashlib.shake_256(repr((seed, client)).encode()).digest(KEY_SIZE)
            self._states[client] = _PPDLState(os.urandom(KEY_SIZE) if seed is None else test_key)
        return self._states[client]

    def _bound(self, client: int, norm: float) -> float:
        clip = self._settings.clip
        if clip != "median":
            return math.inf if clip is None else float(clip)
        norms = self._find_state(client).norms
        if len(norms) < MEDIAN_ROUNDS and 0 < norm < math.inf:
            norms.append(norm)
        return statistics.median(norms) if norms else math.inf

    def state(self, client: int) -> State:
        """Return the client's noise key and first norms, or an empty state if it has used neither."""
        if client not in self._states:
            return {}
        state = self._states[client]
        return {
            "key": torch.tensor(list(state.key), dtype=torch.uint8),
            "draws": state.draws,
            "norms": list(state.norms),
        }

    def restore(self, client: int, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`. A repeated round uses the same noise, so that it cannot be averaged out."""
        self._states.pop(client, None)
        if state:
            key = bytes(read_state("PPDL", state, "key", Tensor).tolist())
            draws, norms = read_state("PPDL", state, "draws", int), read_state("PPDL", state, "norms", list)
            self._states[client] = _PPDLState(key, draws, list(norms))


class PPDLRound(PlainRound):
    """Averages uploads, and measures them if clients are in the same process."""

    def recover(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """Return sum_k |D_k| / |D| times client k's upload and floating-point buffers."""
        result = super().recover(updates, weights)
        measurements = [
            update.measurement for update in updates if isinstance(update, PPDLUpdate) and update.measurement
        ]
        if len(measurements) < len(updates):
            return result
        figures, first_measurement = dict(result.figures), measurements[0]
        if first_measurement.sent_bytes is not None:
            figures["bytes_up"] = first_measurement.sent_bytes + count_bytes(updates[0].buffers.values())
        gradient_norm = sum(w * m.gradient_norm for w, m in zip(weights, measurements, strict=True))
        error_norm = sum(w * m.error_norm for w, m in zip(weights, measurements, strict=True))
        rms = math.sqrt(statistics.fmean(m.rms**2 for m in measurements))
        if first_measurement.noise and rms:
            figures["noise_over_rms"] = first_measurement.noise / rms
        if first_measurement.clipped is not None:
            figures["clipped"] = statistics.fmean(bool(m.clipped) for m in measurements)
        return replace(result, error=error_norm / gradient_norm if gradient_norm else 0.0, figures=figures)


def _norm(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64))  # in float32, squares might overflow or underflow


def select_largest(flat: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest magnitudes; NaN counts as the largest, so that it is always sent."""
    magnitudes = flat.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    threshold = magnitudes.topk(count, sorted=False).values.min()
    result = magnitudes > threshold
    ties = (magnitudes == threshold).nonzero()[: count - int(result.sum()), 0]
    result[ties] = True
    return result


class PPDLCodec(PlainCodec):
    """Like `PlainCodec`, but encodes only the selected elements of a sparsified gradient and their indices."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def encode_update(self, update: PlainUpdate) -> Packed:
        """Encode the selected elements with their indices or a bitmap, whichever is shorter."""
        if self._fraction == 1:
            return super().encode_update(update)
        flat = torch.cat([g.reshape(-1) for g in update.gradients.values()]).cpu()
        selected_indices = flat.nonzero()[:, 0]
        indices = selected_indices.int() if len(flat) < 2**31 else selected_indices
        if 32 * len(selected_indices) > len(flat):
            indices = torch.from_numpy(np.packbits((flat != 0).numpy()))
        return {}, {"selected": flat[selected_indices], "indices": indices} | add_prefix("buffer", update.buffers)

    def decode_update(
        self, defence_round: AnyPlainRound, model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> PlainUpdate:
        """Decode an update; elements that were not selected are 0."""
        if self._fraction < 1:
            gradients = _scatter(tensors, trainable_tensors(model))
            other_tensors = {name: tensor for name, tensor in tensors.items() if name not in ("selected", "indices")}
            tensors = add_prefix("gradient", gradients) | other_tensors
        return super().decode_update(defence_round, model, values, tensors, position)


def _scatter(tensors: Tensors, reference: Tensors) -> Tensors:
    """Return tensors shaped like `reference`, with the selected elements at their indices and 0 elsewhere."""
    count = sum(tensor.numel() for tensor in reference.values())
    elements, indices = tensors.get("selected"), tensors.get("indices")
    if elements is None or indices is None or elements.dim() != 1 or indices.dim() != 1:
        raise BadArgument("update", "the tensors 'selected' and 'indices' are missing or misshapen")
    if indices.dtype == torch.uint8:
        indices = torch.from_numpy(np.flatnonzero(np.unpackbits(indices.numpy())[:count]))
    is_valid = (
        indices.dtype in (torch.int32, torch.int64) and len(indices) == len(elements) and elements.is_floating_point()
    )
    if not is_valid or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < count):
        raise BadArgument("update", f"invalid indices for {len(elements)} elements selected from {count}")
    flat = torch.zeros(count, dtype=elements.dtype)
    flat[indices.long()] = elements
    return split_vector(flat, {name: tensor.to(elements) for name, tensor in reference.items()})
