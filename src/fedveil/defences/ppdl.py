"""PPDL (Shokri and Shmatikov, CCS 2015) in synchronous rounds: clients clip, select and noise what they upload.

docs/defences/ppdl.md says how it differs from the paper, what it costs and what it leaks.
"""

import copy
import hashlib
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.checks import number, one_of, share
from fedveil.defences.clipping import split_vector
from fedveil.defences.interface import Defence, DefenceRound, State
from fedveil.defences.plain import (
    PlainClient,
    PlainCodec,
    PlainRound,
    PlainServer,
    PlainUpdate,
    check_names,
    check_number,
    count_bytes,
    trainable_tensors,
)
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Aggregate, Loss
from fedveil.wire import Packed, Tensors, Values, add_prefix, strip_prefix

MEDIAN_ROUNDS = 100
KEY = 16  # bytes: a torch.Generator would use 32 bits of a seed, few enough to try them all
SETTINGS: dict[str, dict[str, float]] = {
    "sel": {"fraction": 0.1},
    "noise": {"sigma": 1e-2},
    "both": {"fraction": 0.1, "sigma": 1e-2},
}


@dataclass(repr=False, eq=False)
class _Client:
    """A client's private state: the key of its noise, its draws so far, the norms of its first gradients."""

    key: bytes
    draws: int = 0
    norms: list[float] = field(default_factory=list)

    def normal(self, count: int) -> Tensor:
        """Standard normal numbers: every draw has a stream of Philox to itself, under a key of 128 bits."""
        self.draws += 1
        stream = np.random.Philox(key=int.from_bytes(self.key, "little"), counter=self.draws << 192)
        return torch.from_numpy(np.random.Generator(stream).standard_normal(count))


@dataclass(frozen=True)
class Measurement:
    """How an upload changed a gradient; it stays in this process."""

    size: float
    change: float
    rms: float
    clipped: bool
    numbers: int  # bytes of the selected numbers, and of their indices or bitmap


@dataclass(frozen=True, eq=False)
class PPDLUpdate(PlainUpdate):
    """A clipped, thinned and noised gradient; no message carries the measurement."""

    measurement: Measurement | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type["PPDLUpdate"], tuple[Tensors, Tensors]]:
        return PPDLUpdate, (self.gradients, self.buffers)  # the measurement stays in this process


class PPDL(Defence[nn.Module, PlainUpdate]):
    """Weighted mean of gradients that clients have clipped, thinned and noised, in this order.

        1. clip      g <- g min(1, bound / |g|), |g| over the whole gradient
        2. select    all but the max(1, round(fraction n)) largest of |g_1| ... |g_n| become 0; of equal ones the first
                     stay, in the order of the model's parameters
        3. noise     g_j <- g_j + N(0, sigma^2) where g_j was selected

    A step whose argument is at its neutral value (clip None, fraction 1, sigma 0) leaves gradients as they are to the
    last bit. Buffers travel as they are. A gradient with NaN or infinity is not clipped: the server refuses it.

    With clip "median", a client's bound is the median of its own norms in the first 100 rounds in which it took part;
    until then, of those so far, this round's included. Norms of 0 do not count. No message is needed.

    A round's `error` is sum_k w_k |upload_k - g_k| / sum_k w_k |g_k|, and its figures are "noise_over_rms", sigma over
    the root mean square of the numbers it is added to, and "clipped", the share of clients that were. No message
    carries them: they are known only where server and clients share this object. Elsewhere error is 0.

    Args:
        fraction: of a gradient's numbers that a client uploads.
        sigma: standard deviation of the noise. It gives no differential privacy that is worth its name.
        clip: largest norm of a client's gradient, "median", or None.
        seed: makes the noise repeatable, for tests. Otherwise it comes from the operating system.
    """

    fusable = False
    remote_settings = ("fraction", "sigma", "clip")

    def __init__(
        self,
        fraction: float = 0.1,
        sigma: float = 0.0,
        clip: float | str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        share("PPDL", "fraction", fraction, "fraction=1 uploads all of the gradient")
        if not number(sigma) or not 0 <= sigma < math.inf:
            what = f"sigma must be a standard deviation, 0 or more, got {sigma!r}"
            raise BadArgument("PPDL", what, "sigma=0 adds no noise")
        if clip not in (None, "median") and not (number(clip) and 0 < clip < math.inf):
            what = f"clip must be a norm above 0, 'median' or None, got {clip!r}"
            raise BadArgument("PPDL", what, "clip=None leaves gradients as long as they are")
        if seed is not None and type(seed) is not int:
            raise BadArgument("PPDL", f"seed must be an int or None, got {seed!r}", "leave it out, but for tests")
        self.name, self.fraction, self.sigma = "ppdl", float(fraction), check_number("PPDL", "sigma", sigma)
        self.clip = clip if clip in (None, "median") else check_number("PPDL", "clip", clip)
        self.seed, self.repeatable = seed, seed is not None

    @classmethod
    def named(
        cls, setting: str = "sel", *, fraction: float | None = None, sigma: float | None = None, seed: int | None = None
    ) -> "PPDL":
        """One of three settings: "sel" selects, "noise" clips at the median and adds noise, "both" does all of it.

        `fraction` is 0.1 by default, and not for "noise"; `sigma` is 1e-2, and not for "sel".
        """
        values = dict(SETTINGS[one_of("PPDL.named", "setting", setting, SETTINGS)])
        for key, value in {"fraction": fraction, "sigma": sigma}.items():
            if value is not None and key not in values:
                what = f"setting {setting!r} has no {key}, got {value!r}"
                raise BadArgument("PPDL.named", what, f'PPDL.named("both", {key}={value!r})')
            if value is not None:
                values[key] = value
        clip = "median" if "sigma" in values else None
        found = cls(values.get("fraction", 1.0), values.get("sigma", 0.0), clip, seed=seed)
        found.name = f"ppdl-{setting}"
        return found

    @property
    def codec(self) -> "PPDLCodec":
        """The model down, selected numbers up."""
        return PPDLCodec(self.fraction)

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "PPDLServer":
        """Prepare the server for a run."""
        return PPDLServer(self, model)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "PPDLClient":
        """Prepare clients for a run."""
        return PPDLClient(self, model, loss)

    def client_view(self, model: nn.Module, broadcast: nn.Module) -> nn.Module:
        """Return a copy of the true model."""
        return copy.deepcopy(broadcast)


class PPDLClient(PlainClient):
    """Clips, selects and adds noise; keeps each client's source of noise and first norms."""

    def __init__(self, settings: PPDL, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self._settings = settings
        self._clients: dict[int, _Client] = {}

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """Clip, thin and noise the client's gradient of this round; what is not selected is 0."""
        fraction, sigma = self._settings.fraction, self._settings.sigma
        if fraction == 1 and self._settings.clip is None and not sigma:
            return update
        true = torch.cat([g.reshape(-1) for g in update.gradients.values()])
        size = _norm(true)
        bound = self._bound(client, size)
        clipped = bound < size < math.inf
        short = true * (bound / size) if clipped else true
        count = max(1, round(fraction * len(true)))
        kept = _largest(short, count) if count < len(true) else None
        values = short if kept is None else short[kept]
        rms = _norm(values) / math.sqrt(count)
        if sigma:
            values = values + sigma * self._client(client).normal(count).to(true)
        sent = values if kept is None else torch.zeros_like(true).masked_scatter_(kept, values)
        numbers = count * true.element_size() + min(4 * count, math.ceil(len(true) / 8))
        measurement = Measurement(size, _norm(sent - true), rms, clipped, numbers)
        return PPDLUpdate(split_vector(sent, update.gradients), update.buffers, measurement)

    def _client(self, client: int) -> _Client:
        if client not in self._clients:
            seed = self._settings.seed
            seeded = hashlib.shake_256(repr((seed, client)).encode()).digest(KEY)
            self._clients[client] = _Client(os.urandom(KEY) if seed is None else seeded)
        return self._clients[client]

    def _bound(self, client: int, size: float) -> float:
        clip = self._settings.clip
        if clip != "median":
            return math.inf if clip is None else float(clip)
        norms = self._client(client).norms
        if len(norms) < MEDIAN_ROUNDS and 0 < size < math.inf:
            norms.append(size)
        return statistics.median(norms) if norms else math.inf

    def state(self, client: int) -> State:
        """Return the state of its source of noise, and its first norms; nothing for a client that used neither."""
        if client not in self._clients:
            return {}
        own = self._clients[client]
        return {"key": torch.tensor(list(own.key), dtype=torch.uint8), "draws": own.draws, "norms": list(own.norms)}

    def restore(self, client: int, state: Mapping[str, Any]) -> None:
        """Continue from `state`: a round done again gets the same noise, so that nobody can average it away."""
        self._clients.pop(client, None)
        if not state:
            return
        if {"key", "draws", "norms"} - state.keys():
            what = f"client {client}'s state is of another defence"
            raise BadArgument("PPDL", what, "start the run again")
        self._clients[client] = _Client(bytes(state["key"].tolist()), int(state["draws"]), list(state["norms"]))


class PPDLServer(PlainServer):
    """Averages uploads, and measures them where clients are in the same process."""

    def __init__(self, settings: PPDL, model: nn.Module) -> None:
        super().__init__(model)
        self._settings = settings

    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "PPDLRound":
        """Broadcast the model."""
        return PPDLRound(self._settings, model, self.figures)


class PPDLRound(PlainRound):
    """Averages uploads."""

    def __init__(self, settings: PPDL, model: nn.Module, figures: Mapping[str, float]) -> None:
        super().__init__(model, figures)
        self._settings = settings

    def recover(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """Return sum_k |D_k| / |D| times client k's upload and floating-point buffers."""
        result = super().recover(updates, weights)
        found = [update.measurement for update in updates if isinstance(update, PPDLUpdate) and update.measurement]
        if len(found) < len(updates):
            return result
        figures = dict(result.figures)
        if self._settings.fraction < 1:
            figures["bytes_up"] = found[0].numbers + count_bytes(updates[0].buffers.values())
        size = sum(w * m.size for w, m in zip(weights, found, strict=True))
        change = sum(w * m.change for w, m in zip(weights, found, strict=True))
        rms = math.sqrt(statistics.fmean(m.rms**2 for m in found))
        if self._settings.sigma and rms:
            figures["noise_over_rms"] = self._settings.sigma / rms
        if self._settings.clip is not None:
            figures["clipped"] = statistics.fmean(m.clipped for m in found)
        return replace(result, error=change / size if size else 0.0, figures=figures)


def _norm(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64))  # squares of float32 might overflow or vanish


def _largest(flat: Tensor, count: int) -> Tensor:
    """Where the `count` largest sizes are; of equal ones the first. NaN is larger than all, so it is never lost."""
    sizes = flat.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(count, sorted=False).values.min()
    kept = sizes > least
    ties = (sizes == least).nonzero()[: count - int(kept.sum()), 0]
    kept[ties] = True
    return kept


class PPDLCodec(PlainCodec):
    """As plain, but of a thinned gradient only the selected numbers and their indices travel."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def encode_update(self, update: PlainUpdate) -> Packed:
        """Encode selected numbers, with indices or a bitmap, whichever is shorter."""
        if self._fraction == 1:
            return super().encode_update(update)
        flat = torch.cat([g.reshape(-1) for g in update.gradients.values()]).cpu()
        kept = flat.nonzero()[:, 0]
        indices = kept.int() if len(flat) < 2**31 else kept
        if 32 * len(kept) > len(flat):
            indices = torch.from_numpy(np.packbits((flat != 0).numpy()))
        return {}, {"selected": flat[kept], "indices": indices} | add_prefix("buffer", update.buffers)

    def decode_update(
        self,
        own: DefenceRound[nn.Module, PlainUpdate],
        model: nn.Module,
        values: Values,
        tensors: Tensors,
        position: int,
    ) -> PlainUpdate:
        """Decode an update, with 0 where nothing was selected."""
        if self._fraction < 1:
            check_names(position, tensors, ("buffer/",), ("selected", "indices"))
            gradients = _spread(tensors, trainable_tensors(model))
            tensors = add_prefix("gradient", gradients) | add_prefix("buffer", strip_prefix("buffer", tensors))
        return super().decode_update(own, model, values, tensors, position)


def _spread(tensors: Tensors, like: Tensors) -> Tensors:
    """Return tensors like those given, with the selected numbers at their indices and 0 elsewhere."""
    first, count = next(iter(like.values())), sum(tensor.numel() for tensor in like.values())
    numbers, indices = tensors.get("selected"), tensors.get("indices")
    if numbers is None or indices is None or numbers.dim() != 1 or indices.dim() != 1:
        raise BadArgument("update", "the tensors 'selected' and 'indices' are missing or misshapen")
    if indices.dtype == torch.uint8:
        indices = torch.from_numpy(np.flatnonzero(np.unpackbits(indices.numpy())[:count]))
    fits = indices.dtype in (torch.int32, torch.int64) and len(indices) == len(numbers)
    if not fits or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < count):
        raise BadArgument("update", f"{len(numbers)} numbers selected from {count} do not have these indices")
    flat = torch.zeros(count, dtype=numbers.dtype)
    flat[indices.long()] = numbers
    pieces = torch.split(
        flat.to(first.device), [tensor.numel() for tensor in like.values()]
    )  # dtypes are checked later
    # in the dtype that was sent, which is checked with the shapes
    return {name: piece.view(own.shape) for (name, own), piece in zip(like.items(), pieces, strict=True)}
