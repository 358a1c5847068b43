"""The federation that an audit attacks, whether it was built from a configuration or in Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fedveil.attacks.registry import Attackers, Views, attacker_views, find_attackers
from fedveil.data import Data, DataPart, split
from fedveil.defences.registry import find
from fedveil.federation.local import Federation
from fedveil.runs.build import build_model
from fedveil.runs.settings import Config
from fedveil.studies.federations import observe
from fedveil.studies.gradients.run import build_small_federation, plain_sgd

TRIAL_LR = 0.1  # learning rate of the federations in which records are rebuilt


class TrialBuilder(Protocol):
    """A builder of the small federations in which records are rebuilt."""

    def new_model(self) -> nn.Module:
        """Return a new network."""

    def __call__(self, parts: Sequence[DataPart], trial_index: int, batch_size: int, whole_shard: bool) -> Federation:
        """Return a federation with a new network and one client for each part of the data."""


@dataclass(frozen=True, eq=False)
class AuditSubject:
    """A trained federation to attack, with a builder of small federations like it.

    Attributes:
        name: name of its defence.
        federation: the trained federation; attacks train it for a few more rounds.
        data: its training records, and records that it was not trained on.
        clients: rows of each client in the training records; the attacker is the first client.
        attackers: the attackers that know its defence.
        seed: seed for the choice of records.
        whole_shard: whether clients go through all their records in a round.
        trial: builder of the small federations in which records are rebuilt.
    """

    name: str
    federation: Federation
    data: Data
    clients: tuple[Tensor, ...]
    attackers: Attackers
    seed: int
    whole_shard: bool
    trial: TrialBuilder

    @property
    def is_veiled(self) -> bool:
        """Whether every broadcast has new noise, so that several of them are sampled."""
        return self.name == "veil"

    def observe_all(self) -> Views:
        """Return each attacker's observation, and the reason for each attacker without an observation."""
        return attacker_views(self.attackers, observe(self.federation, self.attackers.broadcasts_needed))


@dataclass(frozen=True)
class ConfiguredTrial:
    """A builder of small federations from a configuration."""

    config: Config
    data: Data

    def new_model(self) -> nn.Module:
        """Return the configured network with its initial values."""
        return build_model(self.config, self.data)

    def __call__(self, parts: Sequence[DataPart], trial_index: int, batch_size: int, whole_shard: bool) -> Federation:
        """Return a federation with the configured defence and network."""
        config = self.config.changed(seed=self.config.training.seed + trial_index)
        model, sgd = build_model(config, self.data), plain_sgd(TRIAL_LR)
        return build_small_federation(config, model, parts, sgd, batch_size, whole_shard=whole_shard)


def configured_subject(config: Config, federation: Federation, data: Data) -> AuditSubject:
    """Return the subject for a trained federation of a configuration."""
    settings, seed = config.data, config.training.seed
    clients = split(data, settings.clients, how=settings.split, seed=seed, alpha=settings.alpha, column=settings.column)
    attackers, whole_shard = find_attackers(find(config.defence.name)), config.training.whole_shard
    trial = ConfiguredTrial(config, data)
    return AuditSubject(config.defence.name, federation, data, tuple(clients), attackers, seed, whole_shard, trial)
