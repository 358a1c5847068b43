"""The client's side of rounds that combine differential privacy for records with secure aggregation.

Since the server chooses the model, the loss and the settings of a round, the client first checks them against its own
limits and enters the round in its ledger. After that, the effect of every record on the sum is bounded: a record for
which the computation fails contributes nothing, all other records contribute as usual, and the sum always contains the
client's share of the noise.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedveil.defences.interface import AnyClient, Samples
from fedveil.errors import Aborted, BadArgument, FedveilError
from fedveil.federation.prepare import make_shards
from fedveil.federation.sums import Words, encode_words, no_words, row_bits
from fedveil.privacy.ledger import PrivacyLedger, open_ledger
from fedveil.privacy.samplers import discrete_gaussian, poisson_sample
from fedveil.privacy.settings import Privacy
from fedveil.records.shards import Shards
from fedveil.records.sources import Source, as_source
from fedveil.scheme.noise import Entropy
from fedveil.secagg import Opening, Policy
from fedveil.secagg.fixed import encode_rows
from fedveil.wire import Values

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
            what = "this client requires differential privacy for each record, but the server does not offer it"
            raise Aborted("policy", "ask", what, 'set privacy=fedveil.Privacy(noise_by="clients", ...) on the server')
        privacy, limits = Privacy.from_terms(terms), policy.privacy
        if limits is None:
            return cls(privacy, policy, None)
        assert privacy.noise is not None
        assert privacy.rate is not None
        for name, allowed, rule in (
            ("noise_by", privacy.noise_by == "clients", "must be clients"),
            ("noise", privacy.noise >= limits.noise, f"must be at least {limits.noise:g}"),
            ("rate", privacy.rate <= limits.rate, f"must be at most {limits.rate:g}"),
            ("colluding", privacy.colluding >= limits.colluding, f"must be at least {limits.colluding}"),
        ):
            if not allowed:
                what = f"{name} = {getattr(privacy, name)} violates this client's policy: it {rule}"
                raise Aborted("policy", "ask", what)
        return cls(privacy, policy, open_ledger(limits.ledger, limits.epsilon, limits.delta))

    def check_format(self, opening: Opening, clip: float | None) -> None:
        """Refuse a format with fractional bits, check words or a clipping norm, since sums are integers."""
        if clip is not None or opening.checks or any(row_bits(opening)):
            what = "sums over records are integers, without fractional bits, check words or a clipping norm"
            raise BadArgument("ask", what)

    def enter(self, task: "ClientTask", model: nn.Module, records: int) -> None:
        """Perform all checks that do not require reading records, then enter the round in the ledger."""
        noise, rate, least = self.privacy.noise, self.privacy.rate, self.policy.min_records
        assert noise is not None
        assert rate is not None
        if task.dtype not in DTYPES:
            raise BadArgument("ask", f"privacy for records requires float32 or float64, not {task.dtype}")
        task.defence.check_records(model, task.loss)
        if self.ledger is not None:
            self._charge(self.ledger, noise, rate)
        elif rate * records < least:  # without limits, the noise may be too small to hide a single record
            what = f"samples of about {rate * records:.3g} records are too small: this client's policy requires {least}"
            raise Aborted("policy", "ask", what)

    def _charge(self, ledger: PrivacyLedger, noise: float, rate: float) -> None:
        """Enter the round in the ledger, without telling the server where the ledger is or why it cannot be used."""
        try:
            ledger.charge(noise, rate)
        except BadArgument as error:
            with contextlib.suppress(Exception):
                print(f"fedveil: {error}", file=sys.stderr)
            what = "this client's ledger cannot be used; the reason is in its log"
            raise Aborted("budget", "ledger", what) from None

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
            model: the architecture.
            source: the client's records.
            prepare: a function that returns all records in the form that the loss expects.
            records: the declared number of records.
            opening: the opening of the attempt.
        """
        try:
            shards = prepare()
            own = task.defence.client(model, shards.example, task.loss)
            sample = own.sample(len(source))
            assert sample is not None
            update = own.step(task.broadcast, Samples(*shards.take(sample[0]), sample[1].to(task.dtype)))
        except Exception as error:
            why = error.what if isinstance(error, FedveilError) else type(error).__name__
            with contextlib.suppress(Exception):  # a failure to print must not be visible to the server
                print(f"fedveil: processing records one by one and skipping those that fail: {why}", file=sys.stderr)
            own, update = _sum_each(task, model, source)
        _, tensors = task.codec.encode_update(own.prepare_sum(update, len(opening.roster)))
        return encode_words(tensors, records, opening, integers=True)

    def no_words(self, opening: Opening) -> Words:
        """Return an encoded sum over no records, which contains only the client's share of the noise, if any."""
        if self.privacy.noise_by == "server" or not self.privacy.noise:
            return no_words(opening)
        values = discrete_gaussian(Entropy(), sum(opening.rows)).astype(np.float64)
        found = encode_rows(values, opening.rows, row_bits(opening), len(opening.roster), opening.checks)
        records = 0 if self.policy.privacy is None else self.policy.privacy.records
        return np.concatenate([np.array([1, records], np.uint64), found])


def _sum_each(task: "ClientTask", model: nn.Module, source: Source) -> tuple[AnyClient, object]:
    """Draw a new sample and process it record by record; return the defence's client and the sum."""
    rate, found, total = task.defence.sampling_rate, None, None
    assert rate is not None
    for index in poisson_sample(Entropy(), len(source), rate):
        with contextlib.suppress(Exception):  # print nothing, because a message could reveal the record
            single = as_source("this client", source.take([int(index)]))
            shards = make_shards(model, task.loss, [single], 1, task.ask.seed, task.dtype)
            own = task.defence.client(model, shards.example, task.loss)
            update = own.step(task.broadcast, Samples(*shards.records(0), torch.ones(1, dtype=task.dtype)))
            found, total = own, own.accumulate(task.broadcast, total, update)[1]
    if found is None:
        raise BadArgument("records", "the computation fails for all of them")
    return found, total
