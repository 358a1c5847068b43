"""Sums for secure aggregation: encode updates as fixed-point words, choose their exponents, and decode the result."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil import secagg
from fedveil.defences.encoding import split_vector
from fedveil.defences.interface import AnyClient, AnyDefence, AnyRanges, AnyRound, Ranges, Samples
from fedveil.defences.registry import find_codec
from fedveil.errors import BadArgument, ModelMismatch
from fedveil.federation.limits import Limits
from fedveil.federation.targets import one_output
from fedveil.graph.inputs import Inputs, count, each
from fedveil.privacy.mechanism import clip_vector
from fedveil.scheme.result import Aggregate
from fedveil.secagg import Aborted, Opening
from fedveil.secagg.fixed import MAX_EXPONENT, MAX_MAGNITUDE, MIN_EXPONENT, decode_rows, encode_rows, wrapped_rows
from fedveil.secagg.messages import HEAD_WORDS
from fedveil.wire import Tensors, add_prefix, strip_prefix

FIRST_EXPONENT = 24  # exponent of rows whose magnitudes are not yet known
FIRST_RECORDS = 2**17  # total number of records assumed until the first sum reveals it
EXTRA_HEADROOM = 16  # bits of headroom added after a sum has wrapped around
MIN_RELATIVE_SIZE = 2.0**-8  # assumed minimum size of a row relative to the largest row of the same kind
MAX_FACTOR = 100.0  # maximum factor of a veil; with larger factors, more digits would be lost than float32 has
PASSES_PREFIX = "passes/"
Words = NDArray[np.uint64]
RowFormat = tuple[tuple[int, ...], tuple[int, ...], bool]  # exponents, rows and checks of an `Opening`


class PackedTensor(NamedTuple):
    """The layout of one tensor of an update as words."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int  # one row per pass, or a single row for other tensors; each row has an exponent

    @property
    def size(self) -> int:
        """The number of words."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """The kind of tensor (passes, gradient, buffer or counter); values of the same kind have similar magnitudes."""
        return self.name.partition("/")[0] if self.dtype.is_floating_point else "counter"


@dataclass(frozen=True)
class Packing:
    """The order of an update's words: the number 1, the client's number of records, and its tensors, sorted by name."""

    parts: tuple[PackedTensor, ...]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Packing":
        """Return the packing of an encoded update."""
        rows = {name: len(tensor) if name.startswith(PASSES_PREFIX) else 1 for name, tensor in tensors.items()}
        sorted_tensors = sorted(tensors.items())
        return cls(
            tuple(
                [PackedTensor(name, tuple(tensor.shape), tensor.dtype, rows[name]) for name, tensor in sorted_tensors]
            )
        )

    @property
    def rows(self) -> tuple[int, ...]:
        """The size of each row."""
        return tuple([size for part in self.parts for size in [part.size // max(part.rows, 1)] * part.rows])

    def pack(self, tensors: Mapping[str, Tensor], records: int, opening: Opening, *, is_weighted: bool = True) -> Words:
        """Return a client's update in fixed point, multiplied by its number of records if `is_weighted` is True.

        An update that is not finite, or too large to be scaled, contributes nothing: zero records and all zeros.
        """
        if self.rows != opening.rows:
            message = f"the server expects {len(opening.rows)} rows, but this client's update has {len(self.rows)}"
            raise ModelMismatch("opening", message, "build the client's model with the same code as the server's")
        vectors = [tensors[part.name].detach().cpu().double().reshape(-1) for part in self.parts]
        values = torch.cat(vectors).numpy() if vectors else np.zeros(0)
        if not np.abs(values).max(initial=0.0) < MAX_MAGNITUDE:  # also true for NaN
            return no_words(opening)
        weighted_values = values * records if is_weighted else values
        result = encode_rows(weighted_values, opening.rows, row_bits(opening), len(opening.roster), opening.checks)
        return np.concatenate([np.array([1, records], np.uint64), result])

    def unpack(self, total: Words, opening: Opening, *, is_weighted: bool = True) -> tuple[int, Tensors]:
        """Return the number of records in a sum and the weighted mean of its updates, with counters rounded.

        Clipped updates are divided by the number of clients, since the number of records that a client claims must not
        scale other clients' updates. If `is_weighted` is False, the sum itself is returned, as integers modulo 2^64.
        """
        records = int(total[1] if opening.checks or not is_weighted else total[0])  # each clipped client counts once
        if not records:
            message = "no client contributed to the sum: training has diverged, or all clients failed"
            raise Aborted("sum", "the sum", message, "check the clients' logs")
        if not 1 <= records < 2**53:
            raise Aborted(
                "sum",
                "the sum",
                f"expected a total of 1 to 2^53 - 1 records, got {records}",
                "look for a hostile client",
            )
        if not is_weighted:
            return records, self._split(total[HEAD_WORDS : HEAD_WORDS + sum(opening.rows)].view(np.int64))
        result = self.sums(total, opening)
        for part in self.parts:
            mean = result[part.name] / records
            result[part.name] = mean.to(part.dtype) if part.dtype.is_floating_point else mean.round().to(part.dtype)
        return records, result

    def sums(self, total: Words, opening: Opening) -> Tensors:
        """Return the sums of all tensors in float64."""
        return self._split(decode_rows(total[HEAD_WORDS:], opening.rows, row_bits(opening)))

    def _split(self, values: NDArray[np.float64] | NDArray[np.int64]) -> Tensors:
        """Return the values of each tensor."""
        result, start = Tensors(), 0
        for part in self.parts:
            result[part.name] = torch.from_numpy(values[start : start + part.size]).reshape(part.shape)
            start += part.size
        return result

    def bound_rounding(self, exponents: Sequence[int], num_clients: int, records: int) -> dict[str, list[float]]:
        """Bound the rounding error of the values of the mean, by row: half a unit per client."""
        remaining_exponents, result = list(exponents), {}
        unit = num_clients * 2.0 ** -(secagg.bits(num_clients, 0) + 1) / records  # the bound for exponent 0
        for part in self.parts:
            rows, remaining_exponents = remaining_exponents[: part.rows], remaining_exponents[part.rows :]
            result[part.name] = [unit * 2.0**exponent for exponent in rows]
        return result

    def choose_exponents(self, sizes: Mapping[str, Sequence[float]], records: int, headroom: int) -> tuple[int, ...]:
        """Return an exponent for each row, given the largest magnitudes in the mean over `records` records.

        A row may be zero, or much smaller than it will be in the next round, so it gets headroom for the values in
        other rows of the same kind: the same pass of other tensors, or other buffers. `headroom` bits are added to each
            row.
        """
        rows = [(part.kind, row, size * records) for part in self.parts for row, size in enumerate(sizes[part.name])]
        max_sizes: dict[tuple[str, int], float] = {}
        for kind, row, size in rows:
            max_sizes[kind, row] = max(max_sizes.get((kind, row), 0.0), size)
        min_sizes = [max(size, MIN_RELATIVE_SIZE * max_sizes[kind, row]) for kind, row, size in rows]
        exponents = [secagg.exponent(size) if 0 < size < math.inf else FIRST_EXPONENT for size in min_sizes]
        return tuple([min(max(exponent + headroom, MIN_EXPONENT), MAX_EXPONENT) for exponent in exponents])


def row_bits(opening: Opening) -> list[int]:
    """Return the number of fractional bits of each row."""
    max_bits = secagg.bits(len(opening.roster), 0)
    return [max_bits - exponent for exponent in opening.exponents]


def no_words(opening: Opening) -> Words:
    """Return the words of a client that contributes nothing to a sum."""
    words = np.zeros(opening.size, np.uint64)
    words[0] = 1
    return words


def check_combination(defence: AnyDefence, model: nn.Module, limits: Limits | None) -> None:
    """Refuse settings that need individual updates, or whose result cannot be computed from a sum of updates."""
    where, fix = "secure_aggregation", "omit secure_aggregation, or use plain or veil"
    inner = defence.base
    if defence.dp_clip is not None and not inner.clippable:
        message = f"differential privacy clips recovered gradients, but {inner.name} clients cannot recover theirs"
        raise BadArgument(where, message, "use plain, whose clients clip their own gradients")
    if not inner.linear:
        raise BadArgument(where, f"{inner.name} is not linear, so a sum of updates cannot be decoded", fix)
    if inner.largest_factor > MAX_FACTOR:
        message = f"factors up to {inner.largest_factor:g} leave too few digits in fixed point"
        raise BadArgument(where, message, f"use multiplicative={MAX_FACTOR:g} or less")
    if limits is not None:
        message = "limits and aggregation rules need individual updates, but the server sees only their sum"
        raise BadArgument(where, message, "set limits=None")
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training and module.momentum is None and module.track_running_stats:
            message = f"{path or 'the model'} averages over all batches (momentum=None), which is not linear"
            raise BadArgument(where, message, "set momentum=0.1")


def encode_words(
    tensors: Mapping[str, Tensor], records: int, opening: Opening, clip: float | None = None, *, integers: bool = False
) -> Words:
    """Encode a client's update as words.

    Args:
        tensors: the encoded update.
        records: the client's number of records, which is the weight of its update.
        opening: the opening of the attempt.
        clip: with differential privacy for clients, the norm to which the gradient is clipped; its weight is then 1.
        integers: whether the update is a sum of integers, which is not weighted.
    """
    if clip is not None:
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            return no_words(opening)
        gradients = {name: tensor for name, tensor in tensors.items() if name.startswith("gradient/")}
        clipped_vector, _, _ = clip_vector(
            torch.cat([gradient.reshape(-1).double() for gradient in gradients.values()]), clip
        )
        tensors, records = split_vector(clipped_vector, gradients), 1
    return Packing.from_tensors(tensors).pack(tensors, records, opening, is_weighted=not integers)


class Sums:
    """Chooses the format of each sum based on earlier sums, and decodes the sum, without using individual updates.

    Args:
        defence: the run's defence.
        client: computes an update from which the magnitudes in the first round are estimated.
        model: the server's model.
        example: inputs for this estimate.
        records: total number of records of all clients, if known.
        steps: number of local steps in a round, if clients train locally.
    """

    def __init__(
        self,
        defence: AnyDefence,
        client: AnyClient,
        model: nn.Module,
        example: Inputs,
        total_records: int | None = None,
        steps: int = 1,
    ) -> None:
        self.model, self.codec, self.clip = model, find_codec(defence), defence.dp_clip
        self.integers, self.min_members = defence.integer_sums, defence.min_members
        self.packing: Packing | None = None
        self._example, self._client = example, client
        self._expected: Mapping[str, Tensor] | None = None
        self._records, self._steps = total_records or FIRST_RECORDS, steps
        self.headroom = 0  # additional bits in the next attempt

    def layout(self, defence_round: AnyRound, num_clients: int) -> RowFormat:
        """Return the format of the words in an attempt with `num_clients` clients."""
        _, tensors = self.codec.template(defence_round.base, self.model)
        if self.clip is not None and not self.integers:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("gradient/")}
        self.packing = packing = Packing.from_tensors(tensors)
        if self.integers:
            return (secagg.bits(num_clients, 0),) * len(packing.rows), packing.rows, False  # no fractional bits
        if self.clip is not None:  # clipped gradients always fit
            exponent = min(max(math.frexp(self.clip)[1] + 1, MIN_EXPONENT), MAX_EXPONENT)
            return (exponent,) * len(packing.rows), packing.rows, False
        if self._expected is None:
            self._expect_first(defence_round)
        exponents = (min(FIRST_EXPONENT + self.headroom, MAX_EXPONENT),) * len(packing.rows)
        if self._expected is not None:
            sizes = _find_ranges(defence_round).bound(self._expected)
            exponents = packing.choose_exponents(sizes, self._records, self.headroom)
        return exponents, packing.rows, True

    def _expect_first(self, defence_round: AnyRound) -> None:
        """Estimate the magnitudes in the first round from a client's step on random inputs."""
        generator, device = torch.Generator().manual_seed(0), next(self.model.parameters()).device
        inputs = each(lambda tensor: _draw_like(tensor, generator), self._example)
        dense_target = torch.zeros_like(one_output(self.model, inputs))
        dense_target.view(-1)[:1] = 1.0
        for targets in (dense_target, torch.zeros(1, dtype=torch.int64)):
            samples = Samples(inputs, targets.expand(count(inputs), *targets.shape[1:]).to(device))
            try:
                with torch.random.fork_rng(devices=[]):
                    expected = self._expect_update(defence_round, samples)
            except Exception:  # the loss expects targets of another kind
                continue
            if all(bool(tensor.isfinite().all()) for tensor in expected.values()):
                self._expected = expected
                return

    def _expect_update(self, defence_round: AnyRound, samples: Samples) -> Mapping[str, Tensor]:
        """Predict an update from one step; with local training, all steps of a round are assumed to be equal."""
        ranges, local_training = _find_ranges(defence_round), self._client.local_training
        if local_training is None:
            return ranges.expect(self._client.step(defence_round.broadcast, samples))
        first_step = ranges.expect(self._client.train(defence_round.broadcast, [samples], local_training))
        growth = local_training.reach(self._steps) / local_training.reach(1)
        return {name: tensor * growth for name, tensor in first_step.items()}

    def aggregate(self, defence_round: AnyRound, total: Words, opening: Opening) -> Aggregate:
        """Compute the result of a round from the sum of all words; abort if the sum wrapped around or is empty."""
        assert self.packing is not None
        num_clients = len(opening.roster)
        wrapped_indices = wrapped_rows(total[HEAD_WORDS:], opening.rows) if opening.checks else []
        if wrapped_indices:
            self.headroom += EXTRA_HEADROOM
            message = f"{len(wrapped_indices)} of {len(opening.rows)} rows wrapped around"
            raise Aborted("sum", "the sum", f"{message}; the next round has {EXTRA_HEADROOM} more bits of headroom")
        records, tensors = self.packing.unpack(total, opening, is_weighted=not self.integers)
        if self.integers:
            return defence_round.recover_total(strip_prefix("sum", tensors), records, num_clients, int(total[0]))
        values, template = self.codec.template(defence_round.base, self.model)
        buffers = add_prefix("buffer", dict(self.model.named_buffers())) if self.clip is not None else {}
        tensors = {name: (tensors | buffers)[name] for name in template}  # in the model's order
        update = self.codec.decode_update(defence_round.base, self.model, values, tensors, 0)
        rows = self.packing.bound_rounding(opening.exponents, num_clients, records)
        ranges = _find_ranges(defence_round)
        expected, rounding = ranges.expect(update, self._expected), ranges.bound_rounding(rows)
        result = defence_round.base.recover([update], [1.0])
        norm = math.hypot(
            *[float(torch.linalg.vector_norm(gradient.double())) for gradient in result.gradients.values()]
        )
        self._expected, self._records, self.headroom = expected, records, 0
        error = result.error + (rounding / norm if norm else 0.0)
        figures = {**result.figures, "records": records, "fixed_point_error": rounding / norm if norm else 0.0}
        result = dataclasses.replace(result, error=error, figures=figures)
        exact_sums = {} if self.clip is None else strip_prefix("gradient", self.packing.sums(total, opening))
        return defence_round.finish_sum(result, exact_sums, int(total[0]))


def _find_ranges(defence_round: AnyRound) -> AnyRanges:
    """Return the round of a linear defence as `Ranges`."""
    assert isinstance(defence_round.base, Ranges)
    return defence_round.base


def _draw_like(example: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal values with the root mean square of `example`, which may be atypical; return integers unchanged."""
    if not example.is_floating_point() or not example.numel():
        return example
    rms = float(example.double().square().mean().sqrt())
    return ((rms if 0 < rms < math.inf else 1.0) * torch.randn(example.shape, generator=generator)).to(example)
