"""Attack the defences that people deploy: what each claims, what it costs, and what each attacker gets.

    FEDVEIL_DATA=../shared/data python -m benchmarks.deployed [--data digits cifar10] [--work runs/deployed]

Two clients train on 500 digits (MLP, squared error) or 2,000 images of CIFAR-10 (small CNN, cross-entropy). Every cell
is a file in the folder of `--work`, and a run that was stopped continues. The page is written at the end. One core.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import machine
from fedveil.attacks.leaked_gradients import Gradients, Leak
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate, average
from fedveil.data import Data
from fedveil.defences.record_private import SumUpdate
from fedveil.defences.registry import find
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import build_optimizer, choose_loss, choose_settings, load_data
from fedveil.runs.settings import Config, Value, configure
from fedveil.studies import verdicts
from fedveil.studies.attack import AttackRequest
from fedveil.studies.audit import results as page
from fedveil.studies.audit.results import AuditResult, judge, list_measures
from fedveil.studies.audit.run import AUDIT, Audit, AuditOptions
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.gradients import run as reconstruction
from fedveil.studies.gradients.server import NUM_OWN_RECORDS, ServerOptions, attack_view, images_and_model, nearest
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob, run_jobs
from fedveil.studies.membership import attacks as membership
from fedveil.studies.study import format_estimate, format_percent

SCALES: Mapping[str, Mapping[str, Value]] = {
    "digits": {"data": "digits", "train_size": 500, "epochs": 150, "loss": "squared_error", "clients": 2},
    "cifar10": {
        "data": "cifar10",
        "train_size": 2000,
        "test_size": 2000,
        "model": "cnn",
        "width": 8,
        "epochs": 20,
        "loss": "cross_entropy",
        "clients": 2,
    },
}
PRIVATE = "DP per record, epsilon "
VARIANTS: Mapping[str, Mapping[str, Value]] = {
    "plain": {},
    "veil": {"groups": 10},
    "ppdl": {},
    "dbcl": {},
    "spn": {},
    "nvflare:PercentilePrivacy": {},
    "nvflare:SVTPrivacy": {},
    "flower:LocalDpMod": {},
    "flower:LocalDpMod, epsilon 1000": {"message_epsilon": 1000.0},
    "flower:fixedclipping_mod": {},
    "topk": {},
    "int8": {},
    f"{PRIVATE}8": {"epsilon": 8.0},
    f"{PRIVATE}1": {"epsilon": 1.0},
}
OPTIONS = AuditOptions(trials=20, broadcasts=2)
SERVER = ServerOptions(rounds=10, steps=200, restarts=1)
PRIVATE_CLAIM = "(epsilon, 1e-5)-differential privacy of every record, in all models together"
HEADER = (
    *("defence", "accuracy, %", "ms per round", "kB up", "membership: loss", "network", "RMIA"),
    "copy, published, %",
    *("copy, adaptive, %", "record, published, dB", "record, adaptive, dB", "record, server, dB"),
)
LABELS = ("defence", "the model", "membership", "records, by clients", "records, by the server", "claim")
TEXT = """Two clients. The attacker of a client's records is the other client; *membership* columns are AUCs, and *copy*
is the agreement of a client's copy with the server's model. The curious server attacks the update of one client with
one record. *Published* attackers do not know the defence, *adaptive* ones do; the best adaptive attacker is shown.
Intervals are 95 %. Verdicts compare the strongest attacker with guessing and with no defence. Settings are the defaults
of `fedveil audit --defence NAME` (FLARE's own for its filters; clipping norm 1 and noise multiplier 1, or epsilon 10,
for Flower's), not tuned: a defence whose model learns nothing hides records for that reason. Accuracy is of one run.
"""


@dataclass(frozen=True)
class ServerRecords(Result):
    """The PSNR of the image that a curious server gets from one record's update, and of the mean image."""

    found: list[float]
    floor: list[float]


@dataclass(frozen=True)
class AttackUpdates:
    """A task that attacks one client's update in several new federations, each for one round."""

    config: Config
    options: ServerOptions

    def __call__(self, progress: Progress, results: JobResults) -> ServerRecords:
        """Return the PSNR of the best attack in each federation."""
        found, floor = list[float](), list[float]()
        for number in range(self.options.rounds):
            progress(number / self.options.rounds, f"update {number + 1}/{self.options.rounds}")
            config = self.config.changed(seed=self.config.training.seed + number)
            data, model = images_and_model(config, None)
            rows = torch.randperm(len(data.train.targets), generator=generator("server", number))[:2]
            parts = [data.train.take(rows[[client]]) for client in range(2)]
            federation = reconstruction.build_small_federation(
                config, model, parts, build_optimizer(config.training), 1
            )
            leak = Leak(federation.model, first_update(federation), federation.loss)
            found.append(self.attack(leak, data, rows, number))
            guessed = reconstruction.guesses(data, rows[:1], generator("guesses", number), excluded=rows)
            floor.append(nearest(guessed["mean image"], data.pixels(data.train.tensor[rows[:1]])).psnr)
        return ServerRecords(found, floor)

    def attack(self, leak: Leak, data: Data, rows: Tensor, number: int) -> float:
        """Return the PSNR of the closest image from any attack on one update."""
        own, rng = data.test.tensor[:NUM_OWN_RECORDS], generator("search", number)
        search = self.options.search(leak.model)
        images = attack_view(leak, search, data, own, 1, rng, lambda fraction: None)
        true = data.pixels(data.train.tensor[rows[:1]])
        return max(nearest(image.cpu(), true).psnr for image in images.values())


def first_update(federation: Federation) -> Gradients:
    """Return what the server recovers from the first client's update; noise that it adds itself is not included."""
    started = federation.defence_server.start_round(federation.model)
    update = federation.clients.updates(started.broadcast, [0], 0)[0]
    if isinstance(update, SumUpdate):
        return {name: sums[0].to(torch.float32) for name, sums in update.sums.items()}
    (result,) = started.base.recover_each([update])
    if isinstance(result, Exception):
        raise result
    return dict(result.gradients)


@dataclass(frozen=True)
class Cell:
    """The jobs that measure one defence on one data set."""

    name: str
    config: Config
    train: StudyJob[TrainedRun]
    shadows: Sequence[StudyJob[Result]]
    audit: StudyJob[AuditResult]
    server: StudyJob[ServerRecords]

    @property
    def jobs(self) -> list[StudyJob[Result]]:
        """All jobs, each after those that it needs."""
        return [self.train, *self.shadows, self.audit, self.server]


def make_cell(data: str, name: str, changes: Mapping[str, Value], work: Path) -> Cell:
    """Return the jobs for a defence."""
    defence = "plain" if name.startswith(PRIVATE) else name.partition(",")[0]
    values: dict[str, Value] = {**SCALES[data], "defence": defence, **changes}
    if name.startswith(PRIVATE):
        del values["epochs"]  # few, larger rounds suit the noise
    config = configure(values)
    loaded = load_data(config)
    config = choose_settings(choose_loss(config, loaded), len(loaded.train.targets))
    label = f"{data}-{name}-".replace(":", ".").replace(", ", "-").replace(" ", "-")
    folder = work / label.rstrip("-")
    request = AttackRequest(config, (defence,), OPTIONS, label=label)
    flags = {"everyone": True, "matched": True}
    shadows = membership.shadow_jobs(config, (defence,), OPTIONS.shadows, folder, label, **flags)
    run = AUDIT.run_folder(request, defence, folder)
    train = StudyJob(f"{label}train", TrainRun(config, run), TrainedRun)
    audit = Audit(config, OPTIONS, run, folder)
    return Cell(
        name,
        config,
        train,
        shadows,
        StudyJob(f"{label}audit", audit, AuditResult, (train,), tuple(shadows)),
        StudyJob(f"{label}server", AttackUpdates(config, SERVER), ServerRecords),
    )


def server_estimate(records: ServerRecords | Failure) -> tuple[Estimate | None, float]:
    """Return the mean PSNR with its interval, and that of the mean image."""
    if isinstance(records, Failure):
        return None, 0.0
    return average(records.found), statistics.fmean(records.floor)


def best_adaptive(audit: AuditResult, column: str) -> Estimate | None:
    """Return the largest figure of the attackers that know the defence, or None if there are none."""
    figures = [audit.figures(name).get(column) for name in audit.names if name != PUBLISHED]
    return max((one for one in figures if one), key=lambda one: one.value, default=None)


def figure_row(cell: Cell, done: JobResults) -> list[str]:
    """Return the figures of a defence."""
    run, audit, server = done[cell.train], done[cell.audit], done[cell.server]
    if isinstance(run, Failure) or isinstance(audit, Failure):
        why = next(one.failed for one in (run, audit) if isinstance(one, Failure))
        return [cell.name, f"failed: {why}", *[""] * (len(HEADER) - 2)]
    last = run.records[-1]
    own, published = audit.attackers[PUBLISHED], audit.figures(PUBLISHED)
    members = own.membership.attacks if own.membership else {}
    areas = [
        format_estimate(members[name].auc, ".2f") if name in members else ""
        for name in ("loss", "white-box network", "RMIA")
    ]
    milliseconds = 1000 * last.seconds / last.round
    return [
        cell.name,
        f"{100 * audit.test:.1f}",
        f"{milliseconds:.1f}",
        f"{last.figures.get('bytes_up', math.nan) / 1000:.1f}",
        *areas,
        format_percent(published[page.AGREEMENT]),
        format_percent(best_adaptive(audit, page.AGREEMENT)),
        format_estimate(published[page.RECORD]),
        format_estimate(best_adaptive(audit, page.RECORD)),
        format_estimate(server_estimate(server)[0]),
    ]


def label_row(cell: Cell, done: JobResults, plain: Cell) -> list[str]:
    """Return the verdicts on a defence, and its claim."""
    audit, reference = done[cell.audit], done[plain.audit]
    if isinstance(audit, Failure) or isinstance(reference, Failure):
        return [cell.name, "failed", "", "", "", ""]
    found = [judge(column, measure, audit, reference) for column, measure in list_measures(reference).items()]
    measure = replace(verdicts.RECORD, needs_adaptive=False)
    figures = [server_estimate(done[one.server]) for one in (cell, plain)]
    guess = figures[1][1]
    own, undefended = (measure.compare([("server", one)], guess) if one else [] for one, _ in figures)
    labels = [*found, verdicts.judge(measure, guess, own, undefended)]
    claim = PRIVATE_CLAIM if cell.name.startswith(PRIVATE) else find(cell.config.defence.name).claim
    return [cell.name, *(str(one.label) if one else "not measured" for one in labels), claim]


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def write_page(cells: Mapping[str, Sequence[Cell]], done: JobResults) -> str:
    """Return the page."""
    lines = ["# Deployed defences under attack", "", f"`python -m benchmarks.deployed`, {machine()}.", "", TEXT]
    for data, own in cells.items():
        plain = own[0]
        audit, (_, floor) = done[plain.audit], server_estimate(done[plain.server])
        guesses = {} if isinstance(audit, Failure) else audit.guesses
        mean = guesses.get(page.RECORD)
        guessing = f"Guessing: accuracy {100 * (guesses.get(page.ACCURACY) or 0):.1f} %, membership 0.5, copy "
        guessing += (
            f"{100 * (guesses.get(page.AGREEMENT) or 0):.1f} %, mean record {mean or math.nan:.1f} dB (clients) "
        )
        guessing += f"and {floor:.1f} dB (server)."
        lines += [f"## {data}", "", guessing, ""]
        lines += [*write_table(LABELS, [label_row(cell, done, plain) for cell in own]), ""]
        lines += [*write_table(HEADER, [figure_row(cell, done) for cell in own]), ""]
    return "\n".join(lines)


def main() -> None:
    """Measure all cells and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployed", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(SCALES), choices=list(SCALES))
    parser.add_argument("--work", type=Path, default=Path("runs/deployed"))
    parser.add_argument("--out", type=Path, default=Path("results/studies/deployed.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    cells = {data: [make_cell(data, name, own, given.work) for name, own in VARIANTS.items()] for data in given.data}
    jobs = [job for own in cells.values() for cell in own for job in cell.jobs]
    done = run_jobs(jobs, given.work / "jobs", workers=1, show=show)
    given.out.write_text(write_page(cells, done))


def show(name: str, fraction: float, step: str) -> None:
    """Print finished jobs."""
    if step in ("done", "kept"):
        print(f"{name}: {step}", flush=True)


if __name__ == "__main__":
    main()
