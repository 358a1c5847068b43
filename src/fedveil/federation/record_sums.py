"""The client's side of rounds that combine differential privacy for records with secure aggregation.

Since the server chooses the model, the loss and the settings of a round, the client first checks these against its own
limits and enters the round in its ledger. After that, the effect of every record on the sum is bounded: a record for
which the computation fails contributes nothing, all other records contribute as usual, and the sum always contains the
client's share of the noise.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.defences.interface import AnyClient, Samples
from fedveil.errors import Aborted, BadArgument
from fedveil.federation.prepare import make_shards
from fedveil.federation.sums import Words, encode_words, no_words, row_bits
from fedveil.privacy.isolation import attempt
from fedveil.privacy.ledger import PrivacyLedger, open_ledger
from fedveil.privacy.samplers import discrete_gaussian
from fedveil.privacy.settings import Privacy
from fedveil.records.inputs import Batch, describe_exactly, join_batches, map_tensors, tensors_by_path
from fedveil.records.shards import Shards
from fedveil.records.sources import Source, Stream, as_source
from fedveil.scheme.noise import Entropy
from fedveil.secagg import Opening, Policy
from fedveil.secagg.fixed import encode_rows
from fedveil.wire import Packed, Values

if TYPE_CHECKING:
    from fedveil.federation.client import ClientTask

DTYPES = (torch.float32, torch.float64)  # in smaller dtypes, ordinary values may overflow


@dataclass(frozen=True, eq=False)
class RecordRound:
    """A round with differential privacy for the client's records."""

    privacy: Privacy
    policy: Policy
    ledger: PrivacyLedger | None

    @classmethod
    def from_terms(cls, terms: Values, policy: Policy) -> "RecordRound":
        """Return a round with the settings that a server sends; abort if the client's policy does not allow them."""
        if not terms:
            message = "this client requires differential privacy for each record, but the server does not offer it"
            raise Aborted(
                "policy", "request", message, 'set privacy=fedveil.Privacy(noise_by="clients", ...) on the server'
            )
        privacy, limits = Privacy.from_terms(terms), policy.privacy
        if limits is None:
            return cls(privacy, policy, None)
        assert privacy.noise is not None
        assert privacy.rate is not None
        for name, is_allowed, requirement in (
            ("noise_by", privacy.noise_by == "clients", "must be clients"),
            ("noise", privacy.noise >= limits.noise, f"must be at least {limits.noise:g}"),
            ("rate", privacy.rate <= limits.rate, f"must be at most {limits.rate:g}"),
            ("colluding", privacy.colluding >= limits.colluding, f"must be at least {limits.colluding}"),
        ):
            if not is_allowed:
                message = f"{name} = {getattr(privacy, name)} violates this client's policy: {name} {requirement}"
                raise Aborted("policy", "request", message)
        return cls(privacy, policy, open_ledger(limits.ledger, limits.epsilon, limits.delta, limits.varying))

    def check_format(self, opening: Opening, clip: float | None) -> None:
        """Refuse a format with fractional bits, check words or a clipping norm, since sums are integers."""
        if clip is not None or opening.checks or any(row_bits(opening)):
            message = "sums over records are integers, without fractional bits, check words or a clipping norm"
            raise BadArgument("request", message)

    def enter(self, task: "ClientTask", model: nn.Module, records: int) -> None:
        """Perform all checks that do not require reading records, then enter the round in the ledger."""
        noise, rate, min_records = self.privacy.noise, self.privacy.rate, self.policy.min_records
        assert noise is not None
        assert rate is not None
        if task.dtype not in DTYPES:
            raise BadArgument("request", f"privacy for records requires float32 or float64, not {task.dtype}")
        self.privacy.capacity(records)
        task.defence.check_records(model, task.loss)
        if isinstance(task.broadcast, nn.Module):  # a veil has already checked the modes
            check_modes(model, task.broadcast)
        if self.ledger is not None:
            self._charge(self.ledger, noise, rate)
        elif rate * records < min_records:  # without limits, the noise may be too small to hide a single record
            message = f"samples of about {rate * records:.3g} records are too small: this client requires {min_records}"
            raise Aborted("policy", "request", message)

    def _charge(self, ledger: PrivacyLedger, noise: float, rate: float) -> None:
        """Enter the round in the ledger; if that fails, do not reveal the path or the cause to the server."""
        try:
            ledger.charge(noise, rate)
        except BadArgument as error:
            with contextlib.suppress(Exception):
                print(f"fedveil: {error}", file=sys.stderr)
            message = "this client's ledger cannot be used; the reason is in its log"
            raise Aborted("budget", "ledger", message) from None

    def sum(
        self,
        task: "ClientTask",
        model: nn.Module,
        source: Source,
        prepare: Callable[[], Shards],
        records: int,
        opening: Opening,
    ) -> Words:
        """Return the encoded sum over a sample; records for which the computation fails contribute nothing.

        Args:
            task: the server's request.
            model: the client's model, which defines the architecture.
            source: the client's records.
            prepare: a function that returns all records in the form that the loss expects.
            records: the declared number of records.
            opening: the opening of the attempt.
        """
        _, tensors = sum_sample(task, model, source, prepare, len(opening.roster))
        return encode_words(tensors, records, opening, integers=True)

    def no_words(self, opening: Opening) -> Words:
        """Return an encoded sum over no records, which contains only the client's share of the noise, if any."""
        if self.privacy.noise_by == "server" or not self.privacy.noise:
            return no_words(opening)
        values = discrete_gaussian(Entropy(), sum(opening.rows)).astype(np.float64)
        result = encode_rows(values, opening.rows, row_bits(opening), len(opening.roster), opening.checks)
        records = 0 if self.policy.privacy is None else self.policy.privacy.records
        return np.concatenate([np.array([1, records], np.uint64), result])


def check_modes(model: nn.Module, broadcast: nn.Module) -> None:
    """Refuse a broadcast that switches a module between training and evaluation mode, which could couple records."""
    modes = {path: module.training for path, module in model.named_modules()}
    for path, module in broadcast.named_modules():
        if module.training != modes[path]:
            message = (
                f"{path or 'the model'} is in {'training' if module.training else 'evaluation'} mode on the server"
            )
            raise BadArgument("request", f"{message}, but not on this client", "use the same mode on both")


def sum_sample(
    task: "ClientTask", model: nn.Module, source: Source, prepare: Callable[[], Shards], num_members: int | None = None
) -> Packed:
    """Return the encoded sum over a sample; records for which the computation fails contribute nothing.

    Args:
        task: the server's request.
        model: the client's model, which defines the architecture.
        source: the client's records.
        prepare: a function that returns all records in the form that the loss expects.
        num_members: with secure aggregation, the number of clients in the sum.
    """
    client = task.defence.client(model, (), task.loss)
    sample = client.sample(len(source))
    assert sample is not None
    _, total = client.accumulate(
        task.broadcast, None, client.step(task.broadcast, Samples(torch.empty(0), torch.empty(0)))
    )
    is_empty = True
    for batch, included in read_slots(task, model, source, prepare, *sample):
        if (update := compute_partial_update(client, task, batch, included)) is not None:
            _, total = client.accumulate(task.broadcast, total, update)
            is_empty = is_empty and not bool(included.any())
    if is_empty and bool(sample[1].any()):
        with contextlib.suppress(Exception):
            print(
                "fedveil: no record could be used; to find the cause, train on these records in one process",
                file=sys.stderr,
            )
    return task.codec.encode_update(client.prepare_sum(total, num_members))


def read_slots(
    task: "ClientTask",
    model: nn.Module,
    source: Source,
    prepare: Callable[[], Shards],
    rows: Tensor,
    included: Tensor,
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the records of a sample in batches, each with a mask of the records to include.

    A record keeps its position in the sample, whatever the other records are: a batch contains zeros in place of
    padding and of records that cannot be used or have another form. Records of a Dataset are read one by one, because
    collating them could make the form or dtype of a record depend on other records.
    """
    if isinstance(source, Stream) and not source.uses_default_collate:
        for row, is_included in zip(rows.tolist(), included.tolist(), strict=True):
            if (batch := read_record(task, model, source, row)) is not None:
                yield batch, torch.tensor([is_included]) & are_finite(batch)
        return
    batch = attempt(lambda: prepare().take_separately(rows))
    is_finite = None if batch is None else attempt(partial(are_finite, batch))
    if batch is None or is_finite is None:
        yield from _read_each(task, model, source, rows, included)
    else:
        yield zero_unused(batch, included & is_finite), included & is_finite


def _read_each(
    task: "ClientTask", model: nn.Module, source: Source, rows: Tensor, included: Tensor
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield a batch for each form of the records, which are read one by one; skip records that cannot be read."""
    with contextlib.suppress(Exception):  # a failure to print must not be visible to the server
        print("fedveil: reading records one by one and skipping those that cannot be used", file=sys.stderr)
    slots: dict[str, list[tuple[int, Batch]]] = {}
    for slot, (row, is_used) in enumerate(zip(rows.tolist(), included.tolist(), strict=True)):
        batch = read_record(task, model, source, row)
        if batch is not None and is_used and bool(are_finite(batch)):
            slots.setdefault(describe_exactly(batch), []).append((slot, batch))
    for entries in slots.values():
        is_used = torch.zeros(len(rows), dtype=torch.bool)
        is_used[[slot for slot, _ in entries]] = True
        entry_indices = torch.zeros(len(rows), dtype=torch.int64)
        entry_indices[is_used] = torch.arange(len(entries))
        yield zero_unused(take_rows(join_batches([batch for _, batch in entries]), entry_indices), is_used), is_used


def read_record(task: "ClientTask", model: nn.Module, source: Source, row: int) -> Batch | None:
    """Return a single record in the form that the loss expects, or None if it cannot be used."""

    def read() -> Batch:
        record_source = as_source("this client", source.take([row]))
        return make_shards(
            model, task.loss, [record_source], 1, task.request.seed, task.dtype, convert_dtypes=True
        ).records(0)

    return attempt(read)  # prints nothing, because a message could reveal the record


def are_finite(batch: Batch) -> Tensor:
    """Return whether each record is free of NaN and infinity."""
    tensors = [*tensors_by_path(batch[0]).values(), batch[1]]
    result = [
        torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else torch.isfinite(tensor) for tensor in tensors
    ]
    return torch.stack([finite.cpu() for finite in result]).all(0)


def take_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return the records with these indices."""
    return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], batch[0]), batch[1][rows.to(batch[1].device)]


def zero_unused(batch: Batch, is_used: Tensor) -> Batch:
    """Replace records that are not used with zeros."""
    is_unused = ~is_used

    def clear(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[is_unused.to(tensor.device)] = 0
        return tensor

    return map_tensors(clear, batch[0]), clear(batch[1])


def compute_partial_update(client: AnyClient, task: "ClientTask", batch: Batch, is_used: Tensor) -> object:
    """Return the update for a batch; if the computation fails, leave out each record for which it fails.

    The result is None if no record remains.
    """

    def step(batch: Batch, is_used: Tensor) -> object:
        return client.step(task.broadcast, Samples(*batch, is_used.to(task.dtype)))

    update = attempt(partial(step, batch, is_used))
    if update is not None:
        return update
    is_used = is_used.clone()
    for slot in is_used.nonzero()[:, 0].tolist():
        index = torch.tensor([slot])
        if attempt(partial(step, take_rows(batch, index), is_used[index])) is None:
            is_used[slot] = False
    return step(zero_unused(batch, is_used), is_used) if is_used.any() else None
