"""PPDL (Shokri and Shmatikov, CCS 2015) in synchronous rounds: clients clip, select and noise what they upload.

docs/defences/ppdl.md says how it differs from the paper, what it costs and what it leaks.
"""

import hashlib
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.checks import number, one_of, share
from fedveil.defences.plain import Plain, PlainMessages, PlainUpdate, check_names, check_number, size_of, split
from fedveil.errors import BadArgument
from fedveil.scheme import Aggregate
from fedveil.wire import Packed, Tensors, Values, those_under, under

MEDIAN_ROUNDS = 100
KEY = 16  # bytes: a torch.Generator would use 32 bits of a seed, few enough to try them all
SETTINGS: dict[str, dict[str, float]] = {
    "sel": {"fraction": 0.1},
    "noise": {"sigma": 1e-2},
    "both": {"fraction": 0.1, "sigma": 1e-2},
}


@dataclass(repr=False, eq=False)
class _Client:
    """What a client keeps to itself: the key of its noise, its draws so far, the norms of its first gradients."""

    key: bytes
    draws: int = 0
    norms: list[float] = field(default_factory=list)

    def normal(self, count: int) -> Tensor:
        """Standard normal numbers: every draw has a stream of Philox to itself, under a key of 128 bits."""
        self.draws += 1
        stream = np.random.Philox(key=int.from_bytes(self.key, "little"), counter=self.draws << 192)
        return torch.from_numpy(np.random.Generator(stream).standard_normal(count))


@dataclass(frozen=True)
class _Measured:
    """What an upload did to a gradient; it stays in this process."""

    size: float
    change: float
    rms: float
    clipped: bool
    numbers: int  # bytes of those that were selected, and of which they are: indices or a bitmap


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

    A round's `error` is sum_k w_k |upload_k - g_k| / sum_k w_k |g_k|, and its figures are "noise_over_rms", sigma over
    the root mean square of the numbers it is added to, and "clipped", the share of clients that were. No message
    carries them: they are known only where server and clients share this object. Elsewhere error is 0.

    Args:
        fraction: of a gradient's numbers that a client uploads.
        sigma: standard deviation of the noise. It gives no differential privacy that is worth its name.
        clip: largest norm of a client's gradient, "median", or None.
        seed: makes the noise repeatable, for tests. Otherwise it comes from the operating system.
    """

    linear = False
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
        self._seed = seed
        self._clients: dict[int, _Client] = {}
        self._measured: WeakKeyDictionary[PlainUpdate, _Measured] = WeakKeyDictionary()  # by upload

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
            values = values + self.sigma * self._client(client).normal(count).to(true)
        sent = values if kept is None else torch.zeros_like(true).masked_scatter_(kept, values)
        numbers = count * true.element_size() + min(4 * count, math.ceil(len(true) / 8))
        result = PlainUpdate(split(sent, update.gradients), update.buffers)
        self._measured[result] = _Measured(size, _norm(sent - true), rms, clipped, numbers)
        return result

    def _client(self, client: int) -> _Client:
        if client not in self._clients:
            seeded = hashlib.shake_256(repr((self._seed, client)).encode()).digest(KEY)
            self._clients[client] = _Client(os.urandom(KEY) if self._seed is None else seeded)
        return self._clients[client]

    def _bound(self, client: int, size: float) -> float:
        if self.clip != "median":
            return math.inf if self.clip is None else float(self.clip)
        norms = self._client(client).norms
        if len(norms) < MEDIAN_ROUNDS and 0 < size < math.inf:
            norms.append(size)
        return statistics.median(norms) if norms else math.inf

    def aggregate(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """sum_k |D_k| / |D| times client k's upload and floating buffers."""
        result = super().aggregate(updates, weights)
        measured = [self._measured[update] for update in updates if update in self._measured]
        if len(measured) < len(updates):
            return result
        figures = dict(result.figures)
        if self.fraction < 1:
            figures["bytes_up"] = measured[0].numbers + size_of(updates[0].buffers.values())
        size = sum(w * m.size for w, m in zip(weights, measured, strict=True))
        change = sum(w * m.change for w, m in zip(weights, measured, strict=True))
        rms = math.sqrt(statistics.fmean(m.rms**2 for m in measured))
        if self.sigma and rms:
            figures["noise_over_rms"] = self.sigma / rms
        if self.clip is not None:
            figures["clipped"] = statistics.fmean(m.clipped for m in measured)
        return replace(result, error=change / size if size else 0.0, figures=figures)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Clients go on from what `restore_client` gives them, or begin anew."""
        self._clients.clear()

    def client_state(self, client: int) -> dict[str, Any]:
        """The state of its source of noise, and its first norms; nothing for a client that has used neither."""
        if client not in self._clients:
            return {}
        own = self._clients[client]
        return {"key": torch.tensor(list(own.key), dtype=torch.uint8), "draws": own.draws, "norms": list(own.norms)}

    def restore_client(self, client: int, state: Mapping[str, Any]) -> None:
        """Go on from `client_state`: a round done again gets the same noise, so that nobody can average it away."""
        self._clients.pop(client, None)
        if not state:
            return
        if {"key", "draws", "norms"} - state.keys():
            what = f"client {client}'s state is of an older version or of another defence"
            raise BadArgument("PPDL", what, "start the run anew")
        self._clients[client] = _Client(bytes(state["key"].tolist()), int(state["draws"]), list(state["norms"]))


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


class PPDLMessages(PlainMessages):
    """As plain, but of a thinned gradient only the numbers that were selected, and where they are."""

    def pack_update(self, defence: PPDL, update: PlainUpdate) -> Packed:
        """Places as indices or as a bitmap, whichever is shorter."""
        if defence.fraction == 1:
            return super().pack_update(defence, update)
        flat = torch.cat([g.reshape(-1) for g in update.gradients.values()]).cpu()
        kept = flat.nonzero()[:, 0]
        places = kept.int() if len(flat) < 2**31 else kept
        if 32 * len(kept) > len(flat):
            places = torch.from_numpy(np.packbits((flat != 0).numpy()))
        return {}, {"selected": flat[kept], "places": places} | under("buffer", update.buffers)

    def unpack_update(self, defence: PPDL, model: nn.Module, values: Values, tensors: Tensors, position: int) -> Any:
        """With 0 where nothing was selected."""
        if defence.fraction < 1:
            check_names(position, tensors, ("buffer/",), ("selected", "places"))
            gradients = self._spread(tensors, self.wanted(defence, model))
            tensors = under("gradient", gradients) | under("buffer", those_under("buffer", tensors))
        return super().unpack_update(defence, model, values, tensors, position)

    def _spread(self, tensors: Tensors, wanted: Tensors) -> Tensors:
        first, count = next(iter(wanted.values())), sum(like.numel() for like in wanted.values())
        numbers, places = tensors.get("selected"), tensors.get("places")
        if numbers is None or places is None or numbers.dim() != 1 or places.dim() != 1:
            raise BadArgument("update", "the tensors 'selected' and 'places' are missing or misshapen")
        if places.dtype == torch.uint8:
            places = torch.from_numpy(np.flatnonzero(np.unpackbits(places.numpy())[:count]))
        whole = places.dtype in (torch.int32, torch.int64) and len(places) == len(numbers)
        if not whole or (len(places) and not 0 <= int(places.min()) <= int(places.max()) < count):
            raise BadArgument("update", f"{len(numbers)} numbers selected from {count} cannot be at these places")
        flat = torch.zeros(count, dtype=numbers.dtype)
        flat[places.long()] = numbers
        pieces = torch.split(flat.to(first.device), [like.numel() for like in wanted.values()])
        return {name: piece.view(like.shape) for (name, like), piece in zip(wanted.items(), pieces, strict=True)}


MESSAGES = PPDLMessages(PPDL, ("fraction", "sigma", "clip"))
