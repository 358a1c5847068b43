"""Differential privacy for records, added to plain training or to a veil (docs/defences/privacy.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from fedveil.defences.interface import (
    NO_RECORDS,
    RECORDS_FIX,
    AnyClient,
    AnyCodec,
    AnyDefence,
    AnyRound,
    AnyServer,
    Codec,
    Defence,
    DefenceClient,
    DefenceRound,
    DefenceServer,
    Samples,
)
from fedveil.defences.private import find_moving_buffers
from fedveil.defences.state import State, StateValue, read_state
from fedveil.errors import Aborted, BadArgument, IncompleteUpdate, MisshapenUpdate, NonFiniteUpdate, UpdateRefused
from fedveil.graph.inputs import Inputs
from fedveil.privacy.accounting import Accountant
from fedveil.privacy.gradients import clipped_sums, refuse_coupling
from fedveil.privacy.mechanism import LARGEST, add_noise, quantise
from fedveil.privacy.samplers import poisson_sample
from fedveil.privacy.settings import Privacy
from fedveil.scheme import Aggregate, Entropy, Loss
from fedveil.wire import Packed, Tensors, Values, add_prefix, strip_prefix

SUM = "sum"  # prefix of the tensors of an update


@dataclass(frozen=True, eq=False)
class SumUpdate:
    """Sums of clipped gradients by parameter, in float64 with one row per candidate; once uploaded, in grid units."""

    sums: Tensors


class RecordPrivate(Defence[object, SumUpdate]):
    """A defence whose rounds are differentially private for single records.

        S_k  the sum of client k's sampled per-record gradients, each clipped to norm C (`fedveil.privacy.gradients`)
        G  = (sum_k S_k + noise) / (rate sum_k N_k),  N_k the declared number of client k's records

    Each client draws a Poisson sample of its own records from the operating system's entropy. Independent samples at
    one rate are a sample of all records together, whatever the clients' sizes.

    Guarantees: anyone who sees the models after the rounds, even all other clients together, learns about one record
      no more than epsilon and delta allow (`fedveil.privacy.accounting`). With noise by clients and secure aggregation
      the same holds for a server that follows the protocol. Neighbouring data give the same messages but for the sum.
    Not covered: the numbers N_k, what was chosen by looking at the data (settings, preprocessing, test records that
      decide when to stop), and the time that a client takes for a sample larger than `Privacy.capacity`.

    Args:
        inner: plain, or a veil with decoys. Factors other than 1 (`multiplicative`) distort norms and noise.
        privacy: the settings, resolved.
        entropy: `Entropy.for_tests(seed)` for repeatable tests, in which nothing is private.
    """

    durable = True
    fusable = False
    linear = True
    integer_sums = True

    def __init__(self, inner: AnyDefence, privacy: Privacy, *, entropy: Entropy | None = None) -> None:
        if not inner.has_record_gradients:
            raise BadArgument("privacy", f"{inner.name}: {NO_RECORDS}", RECORDS_FIX)
        if inner.largest_factor != 1.0 and not privacy.allow_factors:
            what = f"factors up to {inner.largest_factor:g} change the norms by which gradients are clipped"
            raise BadArgument("privacy", what, "use fedveil.Veil(multiplicative=1.0, decoys=2), or allow_factors=True")
        assert privacy.noise is not None
        assert privacy.rate is not None
        self.inner, self.privacy = inner, privacy
        self.name, self.sampling_rate = f"{inner.name}+dp", privacy.rate
        self.entropy = entropy or Entropy()
        self.accountant = Accountant(privacy.noise, privacy.delta, privacy.rate, privacy.epsilon)
        self.repeatable = self.entropy.for_tests_only or inner.repeatable

    @property
    def asked(self) -> AnyDefence:
        """The inner defence; `record_terms` tell clients the rest."""
        return self.inner

    @property
    def record_terms(self) -> Values:
        """The settings of the sums that clients compute."""
        return self.privacy.terms()

    @property
    def codec(self) -> "Codec[object, SumUpdate] | None":
        """The inner defence's codec for broadcasts, and sums as float64."""
        inner = self.inner.codec
        return None if inner is None else SumCodec(inner)

    def least_members(self, members: int) -> int:
        """Return how many of the members of a sum must be in it, so that it has enough shares of noise."""
        return self.privacy.least_members(members)

    def check_records(self, model: nn.Module, loss: Loss) -> None:
        """Refuse a model or a loss in which records influence one another."""
        refuse_coupling(loss)
        refuse_batch_norm(model)

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "RecordPrivateServer":
        """Prepare the inner server; refuse a model or a loss in which records influence one another."""
        self.check_records(model, loss)
        if moving := find_moving_buffers(model, example):
            what = f"buffer {moving[0]} depends on the records, and is neither clipped nor protected by noise"
            raise BadArgument("privacy", what, "use a module whose buffers stay as they are, or model.eval()")
        return RecordPrivateServer(self, self.inner.server(model, example, loss))

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "RecordPrivateClient":
        """Prepare clients."""
        self.check_records(model, loss)
        return RecordPrivateClient(self, self.inner.client(model, example, loss), count_numbers(model))

    def client_view(self, model: nn.Module, broadcast: object) -> nn.Module:
        """Return the inner defence's view."""
        return self.inner.client_view(model, broadcast)


def count_numbers(model: nn.Module) -> int:
    """Return the number of values in a gradient."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse a model whose outputs for one record depend on the others of its batch."""
    for path, module in model.named_modules():
        couples = isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)
        if couples and (module.training or module.running_mean is None):
            what = f"{path or 'the model'} is {type(module).__name__}, which mixes the records of a batch"
            fix = "use fedveil.models.with_group_norm(model), or model.eval() to keep its statistics"
            raise BadArgument("privacy", what, fix)


class RecordPrivateServer(DefenceServer[object, SumUpdate]):
    """The inner server, and an accountant."""

    accountant: Accountant

    def __init__(self, settings: RecordPrivate, inner: AnyServer) -> None:
        self.settings, self.inner, self.plan = settings, inner, inner.plan
        self.accountant = settings.accountant

    @property
    def draws(self) -> int:  # type: ignore[override]
        """How often the inner server drew noise to keep."""
        return self.inner.draws

    @property
    def has_budget(self) -> bool:  # type: ignore[override]
        """Whether one more round stays within epsilon."""
        return self.accountant.has_budget

    def start_round(self, model: nn.Module, members: Sequence[int | str] | None = None) -> "RecordPrivateRound":
        """Make the inner server's broadcast."""
        return RecordPrivateRound(
            self.settings, self.accountant, self.inner.start_round(model, members), model, members
        )

    def state(self) -> State:
        """Return the inner server's state, the settings, and the rounds that were spent with them."""
        own = self.settings.privacy
        settings = {name: float(getattr(own, name)) for name in ("clip", "noise", "rate", "colluding", "vanishing")}
        return {"inner": self.inner.state(), **settings, "noise_by": own.noise_by, **self.accountant.state()}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue counting; refuse rounds that were spent with other settings."""
        own = self.settings.privacy
        for name in ("clip", "noise", "rate", "colluding", "vanishing", "noise_by"):
            spent, value = read_state("privacy", state, name, str if name == "noise_by" else float), getattr(own, name)
            if spent != value:
                what = f"the rounds so far had {name} = {spent}, not {value}"
                raise BadArgument("privacy", what, "continue with the settings of the first part of the run")
        self.inner.restore(read_state("privacy", state, "inner", dict))
        self.accountant.restore(read_state("privacy", state, "rounds", int), read_state("privacy", state, "own", dict))


class RecordPrivateRound(DefenceRound[object, SumUpdate]):
    """Adds up the clients' sums, adds noise unless clients did, and recovers the gradient."""

    def __init__(
        self,
        settings: RecordPrivate,
        accountant: Accountant,
        inner: AnyRound,
        model: nn.Module,
        members: Sequence[int | str] | None,
    ) -> None:
        self.inner, self.broadcast = inner, inner.broadcast
        self._settings, self._accountant, self._members = settings, accountant, members
        self._numbers, self.template = count_numbers(model), inner.sum_template()

    def recover(self, updates: Sequence[SumUpdate], weights: Sequence[float]) -> Aggregate:
        """Return the noisy mean; weights are the clients' declared numbers of records."""
        for position, update in enumerate(updates):
            check_sums(f"client {position}", update.sums, self.template)
        total = {name: torch.stack([one.sums[name] for one in updates]).sum(0) for name in self.template}
        return self.recover_total(total, sum(weights), None)

    def recover_total(self, total: Tensors, records: float, members: int | None, survivors: int = 0) -> Aggregate:
        """Return the noisy mean from a sum in grid units.

        Args:
            total: the sum, over clients that declare so many records.
            records: declared by these clients.
            members: of the attempt, under secure aggregation.
            survivors: of them, those in the sum.
        """
        if members is not None and survivors < self._settings.least_members(members):
            what = f"{survivors} of {members} clients are in it, and noise is missing if more than "
            raise Aborted("few", "the sum", f"{what}{self._settings.privacy.vanishing} vanish")
        privacy, candidates = self._settings.privacy, len(next(iter(self.template.values())))
        grid = privacy.grid(self._numbers, candidates, members)
        self._accountant.count(self._members)  # before the noise is drawn, in case that is interrupted
        if privacy.noise and privacy.noise_by == "server":
            total = {name: add_noise(own, self._settings.entropy) for name, own in total.items()}
        assert privacy.rate is not None
        share = grid.unit / (privacy.rate * records)
        update = self.inner.from_sums({name: own * share for name, own in total.items()})
        found = self.inner.recover([update], [1.0])
        spent: dict[str, float] = {} if members is None else {"records": records}
        if privacy.noise:
            spent["epsilon"] = self._accountant.epsilon(running=True)
        return Aggregate(found.gradients, {}, found.error, {**found.figures, **spent})

    def count_lost(self) -> None:
        """Count the round: with noise by clients the server may have seen the sum."""
        if self._settings.privacy.noise_by == "clients":
            self._accountant.count(self._members)

    def recover_each(self, updates: Sequence[SumUpdate]) -> list[Aggregate | UpdateRefused]:
        """Refuse, because single sums have too little noise."""
        raise BadArgument("privacy", "it recovers sums with noise, not single updates", "leave limits= out")

    def release(self, *, reuse: bool = False) -> None:
        """Drop the inner secret."""
        self.inner.release(reuse=reuse)


class RecordPrivateClient(DefenceClient[object, SumUpdate]):
    """Samples, clips, adds up; adds its share of the noise if the clients do that."""

    def __init__(self, settings: RecordPrivate, inner: AnyClient, numbers: int) -> None:
        self._privacy, self._entropy = settings.privacy, settings.entropy
        self._inner, self._numbers = inner, numbers

    def sample(self, records: int) -> tuple[Tensor, Tensor]:
        """Draw the records of a round, padded to a public number; return their indices and which of them count."""
        privacy = self._privacy
        assert privacy.rate is not None
        drawn = torch.from_numpy(poisson_sample(self._entropy, records, privacy.rate))
        padding = max(0, privacy.capacity(records) - len(drawn))
        rows = torch.cat([drawn, torch.zeros(padding, dtype=drawn.dtype)])
        return rows, torch.arange(len(rows)) < len(drawn)

    def step(self, broadcast: object, samples: Samples, client: int = 0) -> SumUpdate:
        """Compute the clipped sum of a sample; records of weight 0 do not count."""
        own, count = self._privacy, len(samples.targets)
        included = torch.ones(count, dtype=torch.bool) if samples.weights is None else samples.weights > 0
        task, device = self._inner.record_gradients(broadcast), samples.targets.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout must not follow from a seed
            torch.manual_seed(int(self._entropy.words(1)[0] >> 1))
            found = clipped_sums(task, samples.inputs, samples.targets, included.to(device), own.clip, own.memory)
        return SumUpdate(found)

    def accumulate(self, broadcast: object, total: SumUpdate | None, update: SumUpdate) -> tuple[object, SumUpdate]:
        """Add sums."""
        if total is not None:
            update = SumUpdate({name: total.sums[name] + own for name, own in update.sums.items()})
        return broadcast, update

    def prepare_sum(self, update: SumUpdate, members: int | None) -> SumUpdate:
        """Round to the grid; add a share of noise if clients do."""
        candidates = len(next(iter(update.sums.values())))
        grid = self._privacy.grid(self._numbers, candidates, members)
        sums = {name: quantise(own, grid) for name, own in update.sums.items()}
        if self._privacy.noise and self._privacy.noise_by == "clients":
            sums = {name: add_noise(own, self._entropy) for name, own in sums.items()}
        return SumUpdate(sums)


def check_sums(where: str, sums: Tensors, template: Mapping[str, Tensor]) -> None:
    """Refuse sums of other names or shapes, and numbers that are not integers of the grid."""
    if sums.keys() != template.keys():
        raise IncompleteUpdate(where, "its sums are not those of the model's parameters")
    for name, like in template.items():
        own = sums[name]
        if own.shape != like.shape or own.dtype != torch.float64:
            what = f"sum {name} is {tuple(own.shape)} {own.dtype}, not {tuple(like.shape)} torch.float64"
            raise MisshapenUpdate(where, what)
        if not bool((own.abs() < LARGEST).all()):  # NaN too
            raise NonFiniteUpdate(where, f"sum {name} is not finite, or too large")


class SumCodec(Codec[object, SumUpdate]):
    """The inner broadcast, and sums as float64."""

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
        self,
        own: DefenceRound[object, SumUpdate],
        model: nn.Module,
        values: Values,
        tensors: Tensors,
        position: int,
    ) -> SumUpdate:
        """Decode sums of the model's names and shapes."""
        assert isinstance(own, RecordPrivateRound)
        sums = strip_prefix(SUM, tensors)
        check_sums(f"client {position}", sums, own.template)
        device = next(model.parameters()).device
        return SumUpdate({name: tensor.to(device) for name, tensor in sums.items()})

    def template(self, own: DefenceRound[object, SumUpdate], model: nn.Module) -> Packed:
        """Return sums on the meta device."""
        assert isinstance(own, RecordPrivateRound)
        return {}, add_prefix(SUM, own.template)
