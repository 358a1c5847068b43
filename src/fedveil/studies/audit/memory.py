"""Audit a federation in memory: its records, its reference without the defence, its shadows, and the attacks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fedveil.attacks.membership import halves
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.registry import Attackers, find_attackers
from fedveil.data import Data, DataPart, one_tensor
from fedveil.data.dataset import from_records
from fedveil.defences.interface import AnyDefence
from fedveil.defences.registry import find, find_record
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.federation.targets import target_maker
from fedveil.lookup import import_object
from fedveil.progress import Progress
from fedveil.records.shards import MemoryShards, generator
from fedveil.records.sources import Rows, UserRecords, as_source, check_same_columns
from fedveil.scheme.losses import CLASS_LOSSES
from fedveil.studies.audit.results import UNDEFENDED, AuditResult
from fedveil.studies.audit.run import AuditOptions, attack_subject
from fedveil.studies.audit.subject import AuditSubject
from fedveil.studies.audit.training import RecipeTrial, TrainingRecipe
from fedveil.studies.jobs import Failure
from fedveil.studies.membership import attacks as membership

FUNCTION = "audit"


def report_part(progress: Progress, part_index: int, count: int, label: str) -> Progress:
    """Return a callback that reports the progress of part `part_index` of `count` equal parts."""
    return lambda fraction, step: progress((part_index + fraction) / count, f"{label}: {step}")


def collect_data(federation: Federation, test: UserRecords, name: str) -> Data:
    """Return the clients' records and the held-out records as one data set."""
    shards = federation.shards
    if not isinstance(shards, MemoryShards):
        message = "the clients' records are read batch by batch, but attacks need them in memory"
        raise BadArgument(FUNCTION, message, "pass the records as tensors or arrays")
    inputs = one_tensor(FUNCTION, shards.inputs)
    check_same_columns("test data", test, "the clients", federation.columns)
    source = as_source("test data", test)
    if not isinstance(source, Rows):
        source = Rows("test data", *source.take(range(len(source))))
    make_targets = target_maker(federation.model, federation.loss, (inputs[:1], shards.targets[:1]))
    parts = (inputs, shards.targets), (one_tensor("test data", source.inputs), make_targets(source.targets))
    has_class_targets = isinstance(federation.loss, CLASS_LOSSES)
    train, held_out = (
        (part[0].cpu(), _class_indices(part[1].cpu()) if has_class_targets else part[1].cpu()) for part in parts
    )
    return from_records(name, train, held_out)


def _class_indices(targets: Tensor) -> Tensor:
    """Return one-hot rows as class indices; other targets are returned unchanged."""
    one_hot = targets.is_floating_point() and targets.dim() == 2 and bool((targets.max(1).values == 1).all())
    return targets.argmax(1) if one_hot else targets


def _is_registered(defence: AnyDefence) -> bool:
    """Return whether a defence is an instance of a registered class itself, and not of a subclass."""
    record = find_record(defence)
    result = import_object(record.target, "a defence", "my_package.defences:Mine") if record else None
    return getattr(result, "__self__", result) is type(defence)


@dataclass(frozen=True, eq=False)
class MemoryAudit:
    """An audit of a trained federation, which is not changed.

    Attributes:
        recipe: the federation, with the settings for training others like it.
        data: the federation's records, and records that it was not trained on.
        options: flags of the audit.
    """

    recipe: TrainingRecipe
    data: Data
    options: AuditOptions

    @property
    def name(self) -> str:
        """The name of the defence, without differential privacy."""
        base = self.recipe.federation.defence.requested
        record = find_record(base)
        if record and _is_registered(base):
            return record.name
        return type(base).__name__ if base.name == "plain" else base.name

    @property
    def attackers(self) -> Attackers:
        """The attackers that know the defence; a class derived from plain training has only generic attackers."""
        base = self.recipe.federation.defence.requested
        record = find_record(base)
        return find_attackers(record) if record and (record.name != "plain" or _is_registered(base)) else Attackers()

    def subject(self) -> AuditSubject:
        """Return the federation under its defence."""
        return self._subject(self.name, self.recipe.copy_federation(), self.attackers, RecipeTrial(self.recipe))

    def reference(self, progress: Progress) -> tuple[AuditSubject, str]:
        """Return the federation without its defence, and a note if its model was trained under the defence.

        A veil does not change the result of training, so the existing model is used. For other defences, a new model is
        trained if possible.
        """
        attackers, note, federation = self.attackers, "", None
        if attackers.shadows != "plain":
            try:
                federation = self.recipe.train(self._client_parts(), self.recipe.federation.seed, progress, "plain")
            except DoesNotApply as reason:
                note = f"The reference without a defence is the model trained under {self.name}: {reason.what}."
        federation = federation or self.recipe.copy_federation("plain")
        plain_attackers = find_attackers(find("plain"))
        return self._subject("plain", federation, plain_attackers, RecipeTrial(self.recipe, "plain")), note

    def _subject(self, name: str, reference: Federation, attackers: Attackers, trial: RecipeTrial) -> AuditSubject:
        federation = self.recipe.federation
        return AuditSubject(
            name, reference, self.data, self._client_rows(), attackers, federation.seed, federation.whole_shard, trial
        )

    def _client_rows(self) -> tuple[Tensor, ...]:
        shards = self.recipe.federation.shards
        return tuple(torch.arange(start, start + size) for start, size in zip(shards.starts, shards.sizes, strict=True))

    def _client_parts(self) -> list[DataPart]:
        return [self.data.train.take(rows) for rows in self._client_rows()]

    def train_shadows(self, folder: Path, name: str, progress: Progress) -> None:
        """Train the shadows of a defence, and write their outputs for all records."""
        num_shadows, data, seed = self.options.shadows, self.data, self.recipe.federation.seed
        records = membership.divide_pool(data, self._client_rows(), seed, everyone=True)
        pool, clients = records.pool, len(self._client_rows())
        size = None if self.options.lira else len(data.train.targets)
        training_masks = halves(len(pool.targets), num_shadows, generator("shadows", seed, num_shadows), size)
        defence = "plain" if membership.shadow_defence(name) == "plain" else None
        for index in range(num_shadows):
            report = report_part(progress, index, num_shadows, "shadow")
            parts = [
                pool.take(rows)
                for rows in torch.from_numpy(training_masks[index]).nonzero()[:, 0].tensor_split(clients)
            ]
            shadow = self.recipe.train(parts, seed + 1 + index, report, defence)
            path = membership.shadow_file(folder, name, index)
            membership.write_shadow(shadow, pool, training_masks[index], path)

    def run(self, progress: Progress) -> tuple[dict[str, AuditResult | Failure], tuple[str, ...]]:
        """Return the results by name, as in `AuditStudy`, and notes."""
        dtype = self.recipe.federation.dtype
        notes = [] if dtype == torch.float32 else [f"The model's dtype is {dtype}; a float32 copy was audited."]
        subjects: dict[str, AuditSubject] = {self.name: self.subject()}
        if self.name != "plain":
            subjects[UNDEFENDED], note = self.reference(report_part(progress, 0, 3, "reference"))
            notes += [note] if note else []
        result = dict[str, AuditResult | Failure]()
        with TemporaryDirectory() as folder:
            notes += self._shadow_notes(Path(folder), [subject.name for subject in subjects.values()], progress)
            for index, (label, subject) in enumerate(subjects.items()):
                report = report_part(progress, 1 + index, 3, label)
                result[label] = attack_subject(subject, self.options, Path(folder), report)
        return result, tuple(notes)

    def _shadow_notes(self, folder: Path, names: Sequence[str], progress: Progress) -> Iterator[str]:
        """Train all shadows; yield the reason if they cannot be trained."""
        if not self.options.shadows or len(self._client_rows()) < 2 or self.data.train.targets.dim() != 1:
            return
        for kind in dict.fromkeys(membership.shadow_defence(name) for name in names):
            try:
                self.train_shadows(folder, kind, progress)
            except DoesNotApply as reason:
                yield f"No shadow federations were trained, so RMIA was not run: {reason.what}."
                return
