"""Differential privacy for records, on top of plain training or a veil (see docs/defences/privacy.md)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from fedveil.defences.interface import AnyClient, AnyCodec, AnyDefence, AnyRound, Codec, DefenceClient, Samples
from fedveil.defences.private import PrivateDefence, PrivateRound, PrivateServer
from fedveil.errors import Aborted, BadArgument, NonFiniteUpdate
from fedveil.graph.inputs import Inputs
from fedveil.privacy.accounting import Accountant, Members
from fedveil.privacy.gradients import clipped_sums, refuse_coupling
from fedveil.privacy.mechanism import EXACT_LIMIT, add_noise, quantise, sum_integers
from fedveil.privacy.samplers import poisson_sample
from fedveil.privacy.settings import Privacy
from fedveil.scheme import Aggregate, Entropy, Loss
from fedveil.scheme.recover import check_tensors
from fedveil.wire import Packed, Tensors, Values, add_prefix, strip_prefix

SUM = "sum"  # prefix of tensor names in an update


@dataclass(frozen=True, eq=False)
class SumUpdate:
    """Sums of clipped gradients in float64, with one row per candidate. Uploaded sums are in units of the grid."""

    sums: Tensors


class RecordPrivate(PrivateDefence[object, SumUpdate]):
    """Differential privacy for records: each record's gradient is clipped, and noise is added to the sum.

        S_k  the sum of client k's sampled per-record gradients, each clipped to norm C (`fedveil.privacy.gradients`)
        G  = (sum_k S_k + noise) / (rate sum_k N_k),  N_k the declared number of client k's records

    Each client draws a Poisson sample of its records with randomness from the operating system. Since all clients use
    the same rate, these samples together are a Poisson sample of all records.

    Guarantees: epsilon and delta (`fedveil.privacy.accounting`) bound how much can be learned about a record from the
      models after all rounds, even if all other clients collude. If clients add the noise with secure aggregation,
      this also holds for a server that follows the protocol. Changing one record changes only the sums in messages.
    Not covered: the numbers N_k, choices that depend on the data (settings, preprocessing, when to stop), and the
      time that a client needs for a sample larger than `Privacy.capacity`.

    Args:
        inner: plain training, or a veil with decoys. Factors other than 1 (`multiplicative`) distort norms and noise.
        privacy: the settings, as returned by `Privacy.resolve`.
        entropy: source of random numbers, by default the operating system; `Entropy.for_tests(seed)` repeats them, so
            that nothing is private.
    """

    linear = True
    integer_sums = True

    def __init__(self, inner: AnyDefence, privacy: Privacy, *, entropy: Entropy | None = None) -> None:
        inner.require_record_gradients()
        if inner.largest_factor != 1.0 and not privacy.allow_factors:
            message = f"factors up to {inner.largest_factor:g} change the norms of the gradients to clip"
            raise BadArgument(
                "privacy", message, "use fedveil.Veil(multiplicative=1.0, decoys=2), or allow_factors=True"
            )
        assert privacy.noise is not None
        assert privacy.rate is not None
        super().__init__(inner, Accountant(privacy.noise, privacy.delta, privacy.rate, privacy.epsilon), entropy)
        self.privacy, self.sampling_rate, self.planned_rounds = privacy, privacy.rate, privacy.rounds

    @property
    def requested(self) -> AnyDefence:
        """The inner defence; clients receive all other settings in `record_terms`."""
        return self.inner

    @property
    def record_terms(self) -> Values:
        """The settings that clients need to compute their sums."""
        return self.privacy.terms()

    @property
    def codec(self) -> "Codec[object, SumUpdate] | None":
        """The encoding of the inner defence's broadcast and of the sums."""
        inner = self.inner.codec
        return None if inner is None else SumCodec(inner)

    def min_members(self, num_members: int) -> int:
        """Return the minimum number of members that must contribute to a sum for it to contain enough noise."""
        return self.privacy.min_members(num_members)

    def check_records(self, model: nn.Module, loss: Loss) -> None:
        """Refuse a model or a loss in which records influence one another."""
        refuse_coupling(loss)
        refuse_batch_norm(model)
        dtypes = {
            parameter.dtype
            for parameter in model.parameters()
            if parameter.is_floating_point() or parameter.is_complex()
        }
        if dtypes - {torch.float32, torch.float64}:
            names = " and ".join(sorted(map(str, dtypes)))
            message = f"the model has dtype {names}, in which gradients overflow or underflow before they are clipped"
            raise BadArgument("privacy", message, "use model.float()")

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PrivateServer[object, SumUpdate]:
        """Prepare the inner server; refuse a model or a loss in which records influence one another."""
        self.check_records(model, loss)
        return super().server(model, example, loss)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "RecordPrivateClient":
        """Prepare clients."""
        self.check_records(model, loss)
        return RecordPrivateClient(self, self.inner.client(model, example, loss))

    def wrap(self, inner: AnyRound, model: nn.Module, members: Members) -> "RecordPrivateRound":
        """Return a round that sums the clients' sums and adds noise."""
        return RecordPrivateRound(self, inner, model, members)

    def settings(self) -> dict[str, float | str]:
        """Return all settings on which the noise depends."""
        names = ("clip", "noise", "rate", "colluding", "vanishing")
        return {name: float(getattr(self.privacy, name)) for name in names} | {"noise_by": self.privacy.noise_by}


def count_values(model: nn.Module) -> int:
    """Return the number of values in a gradient."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse a model whose outputs for a record depend on other records in the batch."""
    for path, module in model.named_modules():
        couples_records = isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)
        if couples_records and (module.training or module.running_mean is None):
            message = f"{path or 'the model'} is {type(module).__name__}, which mixes the records of a batch"
            fix = "use fedveil.models.with_group_norm(model), or call model.eval() to keep the statistics"
            raise BadArgument("privacy", message, fix)


class RecordPrivateRound(PrivateRound[object, SumUpdate]):
    """Combines the clients' sums, adds noise unless the clients have added it, and recovers the gradient."""

    def __init__(self, defence: RecordPrivate, inner: AnyRound, model: nn.Module, members: Members) -> None:
        super().__init__(defence, inner, members)
        self._privacy, self._num_values, self.template = defence.privacy, count_values(model), inner.sum_template()
        self._device = next(model.parameters()).device

    def check(self, update: SumUpdate, position: int) -> None:
        """Refuse sums with wrong names, shapes or dtypes, and values that are not finite or too large."""
        client = f"client {position}"
        expected = {name: (tensor.shape, torch.float64) for name, tensor in self.template.items()}
        check_tensors(client, "sum", update.sums, expected, self._device)
        for name, tensor in update.sums.items():
            if not bool((tensor.abs() < EXACT_LIMIT).all()):  # also refuses NaN
                raise NonFiniteUpdate(client, f"sum {name} is not finite or too large")

    def recover(self, updates: Sequence[SumUpdate], weights: Sequence[float]) -> Aggregate:
        """Return the noisy mean; `weights` are the declared numbers of records of the clients."""
        for position, update in enumerate(updates):
            self.check(update, position)
        total = {name: sum_integers([update.sums[name] for update in updates]) for name in self.template}
        return self.recover_total(total, sum(weights), None)

    def recover_total(
        self, total: Tensors, records: float, num_members: int | None, num_survivors: int = 0
    ) -> Aggregate:
        """Return the noisy mean from a sum in grid units.

        Integers are not converted to float64 before noise is added: a hostile client could make the total so large that
        rounding reveals more of the other clients' sums than their sensitivity allows.

        Args:
            total: the sum over clients, as integers modulo 2^64.
            records: the number of records that these clients declare.
            num_members: the number of clients selected for the round, with secure aggregation.
            num_survivors: the number of clients in the sum, with secure aggregation.
        """
        privacy, clients_add_noise = self._privacy, self._privacy.noise_by == "clients"
        if num_members is not None and num_survivors < privacy.min_members(num_members):
            included = f"{num_survivors} of {num_members} clients are included"
            message = f"only {included}, but at most {privacy.vanishing} may be missing"
            raise Aborted("few", "the sum", message)
        grid = privacy.grid(self._num_values, len(next(iter(self.template.values()))), num_members)
        self._accountant.count(self._members)  # count the round first, in case drawing the noise is interrupted
        if privacy.noise and not clients_add_noise:
            total = {name: add_noise(tensor, self._entropy) for name, tensor in total.items()}
        assert privacy.rate is not None
        share = grid.unit / (privacy.rate * records)
        update = self.inner.from_sums({name: tensor.double() * share for name, tensor in total.items()})
        result = self.inner.recover([update], [1.0])
        figures: dict[str, float] = {} if num_members is None else {"records": records}
        if privacy.noise:
            figures["epsilon"] = self._accountant.epsilon(running=True)
        return Aggregate(result.gradients, {}, result.error, {**result.figures, **figures})

    def count_lost(self) -> None:
        """Count the round if clients add the noise, because the server may have seen the sum."""
        if self._privacy.noise_by == "clients":
            self._accountant.count(self._members)


class RecordPrivateClient(DefenceClient[object, SumUpdate]):
    """Samples records, clips and sums their gradients, and adds a share of the noise if clients add noise."""

    def __init__(self, settings: RecordPrivate, inner: AnyClient) -> None:
        self._privacy, self._entropy, self._inner = settings.privacy, settings.entropy, inner

    def sample(self, records: int) -> tuple[Tensor, Tensor]:
        """Return the indices of a sample, padded to a public length, and a mask that excludes the padding.

        The order is random, because rounding depends on a record's position: in a fixed order, a record in the sample
        would change the positions of others.
        """
        privacy = self._privacy
        assert privacy.rate is not None
        sampled_rows = torch.from_numpy(poisson_sample(self._entropy, records, privacy.rate))
        padding = max(0, privacy.capacity(records) - len(sampled_rows))
        rows = torch.cat([sampled_rows, torch.zeros(padding, dtype=sampled_rows.dtype)])
        order = torch.from_numpy(np.argsort(self._entropy.words(len(rows))))
        return rows[order], (torch.arange(len(rows)) < len(sampled_rows))[order]

    def step(self, broadcast: object, samples: Samples, client: int = 0) -> SumUpdate:
        """Compute the sum of clipped gradients over a sample; records with weight 0 are excluded."""
        privacy, count = self._privacy, len(samples.targets)
        is_included = torch.ones(count, dtype=torch.bool) if samples.weights is None else samples.weights > 0
        task, device = self._inner.record_gradients(broadcast), samples.targets.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout must be unpredictable
            torch.manual_seed(int(self._entropy.words(1)[0] >> 1))
            result = clipped_sums(
                task, samples.inputs, samples.targets, is_included.to(device), privacy.clip, privacy.memory
            )
        return SumUpdate(result)

    def accumulate(self, broadcast: object, total: SumUpdate | None, update: SumUpdate) -> tuple[object, SumUpdate]:
        """Add the sums of the next batch."""
        if total is not None:
            update = SumUpdate({name: total.sums[name] + tensor for name, tensor in update.sums.items()})
        return broadcast, update

    def prepare_sum(self, update: SumUpdate, num_members: int | None) -> SumUpdate:
        """Round the sums to the grid, and add a share of the noise if clients add noise."""
        candidates = len(next(iter(update.sums.values())))
        # counted from the sums, because a server chooses which parameters are trained
        num_values = sum(tensor[0].numel() for tensor in update.sums.values())
        grid = self._privacy.grid(num_values, candidates, num_members)
        sums = {name: quantise(tensor, grid) for name, tensor in update.sums.items()}
        if self._privacy.noise and self._privacy.noise_by == "clients":
            sums = {name: add_noise(tensor, self._entropy) for name, tensor in sums.items()}
        return SumUpdate(sums)


class SumCodec(Codec[object, SumUpdate]):
    """Encodes the inner defence's broadcast, and sums in float64."""

    def __init__(self, inner: AnyCodec) -> None:
        self._inner = inner

    def encode_broadcast(self, broadcast: object) -> Packed:
        """Encode the inner broadcast."""
        return self._inner.encode_broadcast(broadcast)

    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> object:
        """Decode the inner broadcast."""
        return self._inner.decode_broadcast(model, values, tensors, loss)

    def encode_update(self, update: SumUpdate) -> Packed:
        """Encode sums."""
        return {}, add_prefix(SUM, update.sums)

    def decode_update(
        self, defence_round: AnyRound, model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> SumUpdate:
        """Decode sums; refuse names and shapes that do not match the model."""
        assert isinstance(defence_round, RecordPrivateRound)
        device = next(model.parameters()).device
        update = SumUpdate({name: tensor.to(device) for name, tensor in strip_prefix(SUM, tensors).items()})
        defence_round.check(update, position)
        return update

    def template(self, defence_round: AnyRound, model: nn.Module) -> Packed:
        """Return sums on the meta device."""
        assert isinstance(defence_round, RecordPrivateRound)
        return {}, add_prefix(SUM, defence_round.template)
