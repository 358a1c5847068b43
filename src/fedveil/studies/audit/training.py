"""Train new federations like an existing one, with the same network, defence, loss, optimizer and learning rates."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from fedveil.attacks.observation import DoesNotApply
from fedveil.data import DataPart
from fedveil.defences.description import copy_defence
from fedveil.defences.interface import AnyDefence
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.studies.audit.subject import TRIAL_LR
from fedveil.studies.gradients.run import plain_sgd

Factory = Callable[[], nn.Module]
ModelAndOptimizer = tuple[nn.Module, torch.optim.Optimizer]
T = TypeVar("T")


def reinitialise(model: nn.Module) -> None:
    """Give a model new initial values with each module's `reset_parameters`; frozen parameters keep their values.

    Raises:
        DoesNotApply: a module with trainable parameters has no such method.
    """
    frozen = [(value, value.detach().clone()) for value in model.parameters() if not value.requires_grad]
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        parameters = list(module.parameters(recurse=False))
        if callable(reset):
            reset()
        elif any(value.requires_grad for value in parameters):
            reason = (
                f"{type(module).__name__} {name!r} has no reset_parameters" if name else "it has no reset_parameters"
            )
            raise DoesNotApply("model", f"the network cannot be retrained, because {reason}; pass model=")
    with torch.no_grad():
        for value, old_value in frozen:
            value.copy_(old_value)


def copy_model_and_optimizer(federation: Federation) -> ModelAndOptimizer:
    """Return float32 copies of a federation's model and optimizer; the new optimizer updates the new model."""
    model, optimizer = copy.deepcopy((federation.model, federation.optimizer))
    if federation.dtype != torch.float32:
        model.float()
        optimizer.load_state_dict(optimizer.state_dict())  # casts the state to the dtype of the parameters
    return model, optimizer


def filter_arguments(function: Callable[..., T], values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the values that a function accepts as arguments."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


@dataclass(frozen=True, eq=False)
class TrainingRecipe:
    """The settings for training federations like an existing one.

    Attributes:
        federation: the existing federation, which is not changed.
        rates: learning rate of each round.
        factory: function that builds the network with new initial values; by default, the modules are reset.
    """

    federation: Federation
    rates: tuple[float, ...]
    factory: Factory | None = None

    def new_model_and_optimizer(self, seed: int) -> ModelAndOptimizer:
        """Return a network with new initial values, and its optimizer without state."""
        model, optimizer = copy_model_and_optimizer(self.federation)
        devices = [] if self.federation.device.type == "cpu" else [self.federation.device]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            if self.factory is None:
                reinitialise(model)
            else:
                model.load_state_dict(self.factory().state_dict())
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        return model, optimizer

    def train(
        self, parts: Sequence[DataPart], seed: int, progress: Progress, defence: str | AnyDefence | None = None
    ) -> Federation:
        """Train a federation for the same number of rounds as the existing one; `defence` replaces the defence."""
        model, optimizer = self.new_model_and_optimizer(seed)
        federation = self.build(model, parts, defence or copy_defence(self.federation.defence), optimizer, seed)
        rounds = len(self.rates)
        federation.fit(
            rounds=rounds,
            on_round=lambda record: progress(record.round / rounds, f"training, round {record.round}/{rounds}"),
            verbose=False,
        )
        return federation

    def build(
        self,
        model: nn.Module,
        parts: Sequence[DataPart],
        defence: str | AnyDefence,
        optimizer: torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        seed: int,
        *,
        replay: bool = True,
    ) -> Federation:
        """Build a federation with the settings of the existing one and, if `replay`, with its learning rates."""
        federation, terms = self.federation, self.federation.terms
        first_lr = self.rates[0] if self.rates else 0.0
        factors = [rate / first_lr for rate in self.rates] if first_lr else []
        schedule = None
        if replay and any(factor != 1.0 for factor in factors):
            schedule = lambda target: LambdaLR(target, lambda index: factors[min(index, len(factors) - 1)])  # noqa: E731
        return Federation(
            model,
            [(part.inputs, part.targets) for part in parts],
            defence,
            optimizer,
            schedule=schedule,
            schedule_every="round",
            clip_norm=federation.clip_norm,
            batch_size=terms.batch_size,
            loss=federation.loss,
            whole_shard=terms.whole_shard,
            participation=federation.policy.participation,
            limits=federation.limits,
            seed=seed,
        )

    def copy_federation(self, defence: str | AnyDefence | None = None) -> Federation:
        """Return a copy of the existing federation, which can be trained without changing the original."""
        federation = self.federation
        model, optimizer = copy_model_and_optimizer(federation)
        parts = [DataPart(*federation.shards.records(client)) for client in range(len(federation.shards.sizes))]
        result = self.build(
            model, parts, defence or copy_defence(federation.defence), optimizer, federation.seed, replay=False
        )
        result.round = federation.round
        return result


@dataclass(frozen=True, eq=False)
class RecipeTrial:
    """A builder of small federations like an existing one; `defence`, if given, replaces the defence."""

    recipe: TrainingRecipe
    defence: str | None = None

    def new_model(self) -> nn.Module:
        """Return a new network, or the trained network if its modules cannot be reset."""
        return self._model(0)

    def _model(self, seed: int) -> nn.Module:
        try:
            return self.recipe.new_model_and_optimizer(seed)[0]
        except DoesNotApply:
            return copy_model_and_optimizer(self.recipe.federation)[0]

    def __call__(self, parts: Sequence[DataPart], trial_index: int, batch_size: int, whole_shard: bool) -> Federation:
        """Return a federation with the defence and loss of the existing one."""
        federation, seed = self.recipe.federation, self.recipe.federation.seed + trial_index
        return Federation(
            self._model(seed),
            [(part.inputs, part.targets) for part in parts],
            self.defence or copy_defence(federation.defence),
            plain_sgd(TRIAL_LR),
            batch_size=batch_size,
            loss=federation.loss,
            whole_shard=whole_shard,
            fuse=False,
            seed=seed,
        )
