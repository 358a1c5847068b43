"""PPDL (Shokri and Shmatikov, CCS 2015) in synchronous rounds: clients clip, select and noise what they upload.

Differs from the paper: see docs/defences/ppdl.md, as for what it costs and what it leaks.
"""

import hashlib
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.defences.interface import Aggregate, one_by_one
from fedveil.defences.plain import Plain, PlainUpdate, size_of
from fedveil.errors import BadArgument

MEDIAN_ROUNDS = 100
SETTINGS: dict[str, dict[str, float]] = {
    "sel": {"fraction": 0.1},
    "noise": {"sigma": 1e-2},
    "both": {"fraction": 0.1, "sigma": 1e-2},
}


@dataclass(repr=False, eq=False)
class _Client:
    """What a client keeps to itself: its source of noise, and the norms of its first gradients."""

    noise: torch.Generator
    norms: list[float]


@dataclass(frozen=True)
class _Measured:
    """What an upload did to a gradient; it stays in this process."""

    size: float
    change: float
    rms: float
    clipped: bool


class PPDL(Plain):
    """Weighted mean of gradients that clients have clipped, thinned and noised, in this order.

        1. clip      g <- g min(1, bound / |g|), |g| over the whole gradient
        2. select    all but the max(1, round(fraction n)) largest of |g_1| ... |g_n| become 0; of equal ones the first
                     stay, in the order of the model's parameters
        3. noise     g_j <- g_j + N(0, sigma^2) where g_j was selected

    A step whose argument is at its neutral value (clip None, fraction 1, sigma 0) leaves gradients as they are to the
    last bit. Buffers travel as they are. A gradient with NaN or infinity is not clipped: the server refuses it.

    With clip "median", a client's bound is the median of its own norms in the first 100 rounds in which it took part;
    until then, of those so far, this round's included. Norms of 0 do not count. No message is needed.

    A round's `error` is sum_k w_k |upload_k - g_k| / sum_k w_k |g_k|, and its details are "noise_over_rms", sigma over
    the root mean square of the numbers it is added to, and "clipped", the share of clients that were. No message
    carries them: they are known only where server and clients share this object. Elsewhere error is 0.

    Args:
        fraction: of a gradient's numbers that a client uploads.
        sigma: standard deviation of the noise. It gives no differential privacy that is worth its name.
        clip: largest norm of a client's gradient, "median", or None.
        seed: makes the noise repeatable, for tests. Otherwise it comes from the operating system.
    """

    fuses = False

    def __init__(
        self,
        fraction: float = 0.1,
        sigma: float = 0.0,
        clip: float | str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.name = "ppdl"
        if not _number(fraction) or not 0 < fraction <= 1:
            what = f"fraction must be above 0 and at most 1, got {fraction!r}"
            raise BadArgument("PPDL", what, "fraction=1 uploads all of the gradient")
        if not _number(sigma) or not 0 <= sigma < math.inf:
            what = f"sigma must be a standard deviation, 0 or more, got {sigma!r}"
            raise BadArgument("PPDL", what, "sigma=0 adds no noise")
        if clip is not None and clip != "median" and not (_number(clip) and 0 < float(clip) < math.inf):
            what = f"clip must be a norm above 0, 'median' or None, got {clip!r}"
            raise BadArgument("PPDL", what, "clip=None leaves gradients as long as they are")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise BadArgument("PPDL", f"seed must be an int or None, got {seed!r}", "leave it out, but for tests")
        self.fraction, self.sigma, self.clip = fraction, sigma, clip
        self._seed = seed
        self._clients: dict[int, _Client] = {}
        self._measured: list[_Measured] = []

    @classmethod
    def named(
        cls, setting: str, *, fraction: float | None = None, sigma: float | None = None, seed: int | None = None
    ) -> "PPDL":
        """One of three settings: "sel" selects, "noise" clips at the median and adds noise, "both" does all of it.

        Args:
            setting: its name.
            fraction: in place of 0.1; not for "noise".
            sigma: in place of 1e-2; not for "sel".
            seed: as for the class.
        """
        if setting not in SETTINGS:
            known = ", ".join(f'"{known}"' for known in SETTINGS)
            raise BadArgument("PPDL.named", f"there is no setting {setting!r}", f"use one of {known}")
        values = dict(SETTINGS[setting])
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
    def repeatable(self) -> bool:  # type: ignore[override]
        """With a seed."""
        return self._seed is not None

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """The client's gradient of this round, clipped, thinned and noised; what is not selected is 0."""
        if self.fraction == 1 and self.clip is None and not self.sigma:
            return update
        true = torch.cat([g.reshape(-1) for g in update.gradients.values()])
        size = _norm(true)
        bound = self._bound(client, size)
        clipped = bound < size < math.inf
        short = true * (bound / size) if clipped else true
        count = max(1, round(self.fraction * len(true)))
        kept = _largest(short, count) if count < len(true) else None
        values = short if kept is None else short[kept]
        rms = _norm(values) / math.sqrt(count)
        if self.sigma:
            draw = torch.randn(count, generator=self._client(client).noise, dtype=true.dtype)
            values = values + self.sigma * draw.to(true.device)
        sent = values if kept is None else torch.zeros_like(true).masked_scatter_(kept, values)
        self._measured.append(_Measured(size, _norm(sent - true), rms, clipped))
        return PlainUpdate(_split(sent, update.gradients), update.buffers)

    def _client(self, client: int) -> _Client:
        if client not in self._clients:
            self._clients[client] = _Client(_generator(self._seed, client), [])
        return self._clients[client]

    def _bound(self, client: int, size: float) -> float:
        """The norm at which to clip a client's gradient of norm `size`."""
        if self.clip != "median":
            return math.inf if self.clip is None else float(self.clip)
        norms = self._client(client).norms
        if len(norms) < MEDIAN_ROUNDS and 0 < size < math.inf:
            norms.append(size)
        return statistics.median(norms) if norms else math.inf

    def aggregate(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """sum_k |D_k| / |D| times client k's upload and floating buffers."""
        measured, self._measured = self._measured, []
        result = super().aggregate(updates, weights)
        if len(measured) != len(updates):
            return result
        details = dict(result.details)
        if self.fraction < 1:
            details["bytes_up"] = _packed(updates[0], self.fraction)
        size = sum(w * m.size for w, m in zip(weights, measured, strict=True))
        change = sum(w * m.change for w, m in zip(weights, measured, strict=True))
        rms = math.sqrt(statistics.fmean(m.rms**2 for m in measured))
        if self.sigma and rms:
            details["noise_over_rms"] = self.sigma / rms
        if self.clip is not None:
            details["clipped"] = statistics.fmean(m.clipped for m in measured)
        return replace(result, error=change / size if size else 0.0, details=details)

    def each(self, updates: Sequence[PlainUpdate]) -> list[Aggregate]:
        """One after another, each with what was measured at its upload."""
        measured, self._measured = self._measured, []
        own = iter(measured if len(measured) == len(updates) else [])

        def alone(update: PlainUpdate) -> Aggregate:
            self._measured = [m for m in [next(own, None)] if m]
            return self.aggregate([update], [1.0])

        return one_by_one(alone, updates)

    def restore(self, state: Mapping[str, Any]) -> None:
        """The server keeps nothing; clients go on from what `restore_client` gives them, or begin anew."""
        self._clients.clear()
        self._measured.clear()

    def client_state(self, client: int) -> dict[str, Any]:
        """The state of its source of noise, and its first norms; nothing for a client that has used neither."""
        if client not in self._clients:
            return {}
        own = self._clients[client]
        return {"noise": own.noise.get_state(), "norms": list(own.norms)}

    def restore_client(self, client: int, state: Mapping[str, Any]) -> None:
        """Go on from `client_state`: a round done again gets the same noise, so that nobody can average it away."""
        self._clients.pop(client, None)
        if state:
            noise = torch.Generator()
            noise.set_state(state["noise"].cpu())
            self._clients[client] = _Client(noise, list(state["norms"]))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _norm(flat: Tensor) -> float:
    """In float64, where squares of float32 neither overflow nor vanish."""
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64))


def _largest(flat: Tensor, count: int) -> Tensor:
    """Where the `count` largest sizes are; of equal ones the first. NaN is larger than all, so it is never lost."""
    sizes = flat.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(count, sorted=False).values.min()
    kept = sizes > least
    ties = (sizes == least).nonzero()[: count - int(kept.sum()), 0]
    kept[ties] = True
    return kept


def _packed(update: PlainUpdate, fraction: float) -> int:
    """Bytes of an upload: the numbers that were selected, and which they are (indices or a bitmap); the buffers."""
    count = sum(g.numel() for g in update.gradients.values())
    kept = max(1, round(fraction * count))
    item = next(iter(update.gradients.values())).element_size()
    return kept * item + min(4 * kept, math.ceil(count / 8)) + size_of(update.buffers.values())


def _split(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each name again."""
    pieces = torch.split(flat, [g.numel() for g in like.values()])
    return {name: piece.view(g.shape).to(g.dtype) for (name, g), piece in zip(like.items(), pieces, strict=True)}


def _generator(seed: int | None, client: int) -> torch.Generator:
    """A Mersenne Twister with all its 624 words drawn: `manual_seed` would use 32 bits, few enough to try them all."""
    width = 4 * 624
    drawn = os.urandom(width) if seed is None else hashlib.shake_256(repr((seed, client)).encode()).digest(width)
    words = torch.from_numpy(np.frombuffer(drawn, dtype="<u4").astype(np.uint64).view(np.uint8))
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()  # 24 bytes of header, then the words, 8 bytes each
    state[24 : 24 + len(words)] = words
    generator.set_state(state)
    return generator
