"""Count the records of a batch that a server recovers, by attacker, protection and batch size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedveil.attacks.first_layer import first_linear, record_from_agreeing_rows
from fedveil.attacks.leaked_gradients import Gradients, Leak, secure_sum
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.scores import proportion
from fedveil.data import Data, DataPart
from fedveil.errors import UpdateRefused
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import build_optimizer, load_data
from fedveil.runs.settings import Config
from fedveil.scheme import Loss
from fedveil.studies.gradients import run as reconstruction
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob
from fedveil.studies.study import format_percent
from fedveil.studies.verdicts import RECOGNITION_DB

NUM_OWN_RECORDS = 64  # number of held-out records that the server has
CLIP, NOISE = 1.0, 1.0  # differential privacy: norm of a record's gradient, and noise multiplier
UNPROTECTED, SECURE_SUM, RECORD_DP = "none", "secure aggregation", f"DP per record, noise {NOISE:g}"
DIRECTIONS, IMPRINT, FLOOR = "sparse directions", "crafted first layer", "floor: other records"
HEADER = ("defence", "protection", "batch", "attacker", "rounds", "records", "recovered, %")
TITLE = "Records recovered from a batch"
MIN_ERROR = 1e-12  # smallest mean squared error that is distinguished from 0


@dataclass(frozen=True)
class RecordCount:
    """The number of records of one batch that an attack recovers.

    Attributes:
        protection: how the server receives the batch's gradient: `UNPROTECTED`, `SECURE_SUM` or `RECORD_DP`.
        batch: number of records.
        attacker: name of the attack.
        found: number of records that were recovered.
        reason: reason why the attack does not apply; "" if it does.
    """

    protection: str
    batch: int
    attacker: str
    found: int
    reason: str = ""


@dataclass(frozen=True)
class CountedRound(Result):
    """The results of all attacks on the batches of one round."""

    counts: list[RecordCount]


def read_updates(federation: Federation, clients: Sequence[int]) -> list[Gradients]:
    """Return each client's recovered gradient, which a server has if there is no secure aggregation."""
    server_round = federation.defence_server.start_round(federation.model).base
    updates = federation.clients.updates(server_round.broadcast, clients, federation.round)
    gradients = []
    for result in server_round.recover_each(updates):
        if isinstance(result, UpdateRefused):
            raise result
        gradients.append(dict(result.gradients))
    return gradients


def count_recovered(records: Tensor, originals: Tensor, mean: Tensor) -> int:
    """Return the number of originals to which an attack comes `RECOGNITION_DB` dB closer than the mean record does.

    Each record found by the attack counts for at most one original.
    """
    records, originals, mean = (tensor.double().flatten(1) for tensor in (records, originals, mean))
    errors = (
        torch.stack([(records - record).square().mean(1) for record in originals])
        if len(records)
        else records.new_ones(1, 0)
    )
    limit = (originals - mean).square().mean(1, keepdim=True).clamp_min(MIN_ERROR) / 10 ** (RECOGNITION_DB / 10)
    is_recovered = (errors.nan_to_num(torch.inf) <= limit).cpu().numpy()
    rows, columns = linear_sum_assignment(is_recovered, maximize=True)
    return int(is_recovered[rows, columns].sum())


def private_mean(model: nn.Module, loss: Loss, part: DataPart, rng: torch.Generator) -> Gradients:
    """Return the mean gradient with differential privacy per record, as a server receives it if clients add the noise.

    Each record's gradient is clipped to `CLIP`. Normal noise with standard deviation `NOISE` times `CLIP` is added to
    their sum.
    """
    from fedveil.privacy.gradients import (  # imported here because other studies do not need it
        RecordGradients,
        clipped_sums,
    )

    mask = torch.ones(len(part.targets), dtype=torch.bool, device=part.targets.device)
    result = {}
    task = RecordGradients.from_model(model, loss)
    for name, value in clipped_sums(task, part.tensor, part.targets, mask, CLIP).items():
        noise = torch.randn(value[0].shape, generator=rng, dtype=value.dtype).to(value)
        result[name] = (value[0] + NOISE * CLIP * noise) / len(part.targets)
    return result


def server_gradient(model: nn.Module, config: Config, part: DataPart, protection: str, rng: torch.Generator) -> Leak:
    """Return a server's view of a batch: a client's update, a sum over clients with one record each, or a DP sum."""
    size, records_per_client = len(part.targets), 1 if protection == SECURE_SUM else len(part.targets)
    parts = [part.take(torch.arange(start, start + records_per_client)) for start in range(0, size, records_per_client)]
    optimizer = build_optimizer(config.training)
    federation = reconstruction.build_small_federation(config, model, parts, optimizer, records_per_client)
    if protection == RECORD_DP:
        result = private_mean(model, federation.loss, part, rng)
    else:
        updates = read_updates(federation, range(len(parts)))
        result = secure_sum(updates, [1] * size).mean() if protection == SECURE_SUM else updates[0]
    parameters = dict(model.named_parameters())
    return Leak(model, {name: value.to(parameters[name]) for name, value in result.items()}, federation.loss)


@dataclass(frozen=True)
class AttackRecords:
    """A task that attacks one batch of each size under each protection, in one round."""

    config: Config
    run: Path | None
    batches: tuple[int, ...]
    number: int

    def __call__(self, progress: Progress, results: JobResults) -> CountedRound:
        """Attack every batch."""
        config = self.config.changed(seed=self.config.training.seed + self.number)
        data = load_data(config)
        model = reconstruction.start_model(config, data, self.run)
        cases = [(protection, size) for protection in (UNPROTECTED, SECURE_SUM, RECORD_DP) for size in self.batches]
        counts = list[RecordCount]()
        for index, (protection, size) in enumerate(cases):
            progress(index / len(cases), f"{size} records, protection: {protection}")
            counts += self.attack(config, data, model, protection, size)
        return CountedRound(counts)

    def attack(self, config: Config, data: Data, model: nn.Module, protection: str, size: int) -> list[RecordCount]:
        """Run every attack on one batch; a crafted network receives a separate gradient."""
        from fedveil.attacks.batch_records import records_from_batch  # imported here because audits do not need it
        from fedveil.attacks.imprint import craft_imprint, read_imprint

        seed = config.training.seed, self.number, size
        order = torch.randperm(len(data.train.targets), generator=generator("records", *seed))
        part, own_records = data.train.take(order[:size]), data.test.tensor[:NUM_OWN_RECORDS]
        rng, mean = generator(protection, *seed), data.train.tensor.mean(0, keepdim=True)

        def attack_sparse_directions() -> Tensor:
            leak = server_gradient(model, config, part, protection, rng)
            return records_from_batch(leak, first_linear(model), size, own_records, rng).inputs

        def attack_agreeing_rows() -> Tensor:
            leak = server_gradient(model, config, part, protection, rng)
            return record_from_agreeing_rows(leak, first_linear(model))[None]

        def attack_crafted_layer() -> Tensor:
            crafted_model = craft_imprint(model, own_records, rng)
            leak = server_gradient(crafted_model, config, part, protection, rng)
            return read_imprint(leak, first_linear(crafted_model))

        attacks: Mapping[str, Callable[[], Tensor]] = {
            "rows that agree": attack_agreeing_rows,
            DIRECTIONS: attack_sparse_directions,
            IMPRINT: attack_crafted_layer,
            FLOOR: lambda: data.train.tensor[order[size : 2 * size]],
        }
        counts = []
        for name, attack in attacks.items():
            try:
                result, reason = count_recovered(attack().cpu(), part.tensor.cpu(), mean.cpu()), ""
            except DoesNotApply as error:
                result, reason = 0, error.what
            counts.append(RecordCount(protection, size, name, result, reason))
        return counts


def record_jobs(
    config: Config, run: Path | None, batches: Sequence[int], rounds: int, label: str
) -> list[StudyJob[CountedRound]]:
    """Return one job per round, with names that begin with `label`; the list is empty without batches."""
    tasks = [AttackRecords(config, run, tuple(batches), number) for number in range(rounds if batches else 0)]
    return [StudyJob(f"{label}-records-{task.number}", task, CountedRound, attacked_run=run) for task in tasks]


def record_rows(rounds: Sequence[CountedRound | Failure]) -> Iterator[list[str]]:
    """Yield one table row per protection, size and attacker, without the column for the defence.

    If a round failed, the only row contains the reason.
    """
    reason = next((result.failed for result in rounds if isinstance(result, Failure)), None)
    if reason is not None:
        yield ["", "", f"failed: {reason}", "", "", ""]
        return
    for cases in zip(*(result.counts for result in rounds if isinstance(result, CountedRound)), strict=True):
        first_case, total, num_recovered = (
            cases[0],
            sum(case.batch for case in cases),
            sum(case.found for case in cases),
        )
        reasons = [case.reason for case in cases if case.reason]
        cell = format_percent(proportion(num_recovered, total)) if len(reasons) < len(cases) else reasons[0]
        yield [
            first_case.protection,
            str(first_case.batch),
            first_case.attacker,
            str(len(cases)),
            f"{num_recovered}/{total}",
            cell,
        ]
