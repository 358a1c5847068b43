"""`fedveil attack gradients`: a victim's images from a gradient, under each defence, seen in two ways."""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fedveil.attacks import Observed
from fedveil.attacks.gradients import METHODS, Reconstruction, Search, reconstruct
from fedveil.attacks.labels import batch_labels, single_label
from fedveil.attacks.leaks import Leak, from_difference, from_upload
from fedveil.attacks.observed import DoesNotApply
from fedveil.attacks.similarity import match, mse, psnr, ssim
from fedveil.data import Data, Part
from fedveil.defences import innermost
from fedveil.defences.registry import record_of
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.local import Federation
from fedveil.federation.shards import generator
from fedveil.lookup import imported
from fedveil.runs.build import build_defence, build_loss, build_model, build_optimizer, load_data, move_to_device
from fedveil.runs.config import Config
from fedveil.runs.folder import resume_federation
from fedveil.scheme import Broadcast
from fedveil.studies.attack import Asked, OnDefences, Results, option
from fedveil.studies.gradients import page
from fedveil.studies.gradients.results import Batch, Figures, Gradients, View
from fedveil.studies.jobs import Done, Job, Progress, Result
from fedveil.studies.pictures import encoded, shape_of
from fedveil.studies.study import Shown
from fedveil.studies.victim import ATTACKER, observe, watch

VICTIM = 1
MISMATCHED = "true W, veiled upload"
Share = Callable[[float], None]  # of a search that is done
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SEARCHES = {"cosine": (800, 2), "idlg": (150, 4), "dlg": (150, 4)}


@dataclass(frozen=True)
class SearchOptions:
    """Flags of a search."""

    method: str | None = option(None, "dlg, idlg or cosine; by default cosine if the network has a ReLU, else idlg")
    steps: int | None = option(None, "steps of a search; by default 800 for cosine, 150 for the others")
    restarts: int | None = option(None, "restarts of a search; by default 2 for cosine, 4 for the others")
    smooth: float = option(1e-2, "weight of the total variation (cosine)")

    def search(self, model: nn.Module) -> Search:
        """The method that suits a network, with what was asked for in place of its defaults."""
        kinked = any(isinstance(module, nn.ReLU) for module in model.modules())
        method = self.method or ("cosine" if kinked else "idlg")
        if method not in METHODS:
            raise BadArgument("--method", f"there is no method {method!r}", " or ".join(METHODS))
        steps, restarts = SEARCHES[method]
        return Search(method, self.steps or steps, self.restarts or restarts, smooth=self.smooth)


@dataclass(frozen=True)
class Options(SearchOptions):
    """The attack's own flags."""

    images: int = option(8, "images of the victim; each batch size takes as many of them as fill whole batches")
    victim_batch: str = option("1,4,8", "records in the victim's batch, several sizes with commas between them")

    def batches(self) -> list[int]:
        """The victim's batch sizes."""
        try:
            sizes = [int(word) for word in self.victim_batch.split(",")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes) or self.images < max(sizes):
            what = f"batches of {self.victim_batch!r} from {self.images} images"
            raise BadArgument("--victim-batch", what, "different sizes such as 1,4,8, none above --images")
        return sizes


def check(config: Config, options: Options, data: Data, run: Path | None) -> None:
    """Refuse what the protocol cannot do."""
    data.pixels(data.train.tensor[:1])
    if not data.classes:
        raise BadArgument(data.name, "it has no classes, and labels are part of the attack", "--data cifar10")
    training, records = config.training, len(data.train.targets)
    wanted = training.batch_size + options.images
    if records < wanted:
        what = f"{records} training records, the attacker and the victim need {wanted}"
        raise BadArgument(data.name, what, "a larger --train-size, or fewer --images")
    known = training.optimizer == "adam" or (training.optimizer == "sgd" and not training.momentum)
    if not is_run(run) and (not known or training.weight_decay):
        what = "the difference of two models is the gradient of one round, or its signs, for plain SGD and Adam only"
        raise BadArgument("--optimizer", what, "--optimizer sgd --momentum 0, or adam; --weight-decay 0")


def is_run(run: Path | None) -> bool:
    """Whether a trained federation is attacked, not a fresh network."""
    return run is not None and bool(checkpoint.found_in(run))


@dataclass(frozen=True)
class AttackBatch:
    """One batch of the victim: a round of the federation, and a search for every gradient that it leaks."""

    config: Config
    options: Options
    run: Path | None
    size: int
    group: int

    def __call__(self, progress: Progress, done: Done) -> Batch:
        """Attack it."""
        config, size, seed = self.config, self.size, self.config.training.seed
        data = load_data(config)
        order = torch.randperm(len(data.train.targets), generator=generator("gradients", seed))
        first = config.training.batch_size
        rows = order[first:][self.group * size : (self.group + 1) * size]
        own, victim = data.train.take(order[:first]), data.train.take(rows)
        model = build_model(config, data)  # fresh: the state in which gradient inversion is published
        optimizer = build_optimizer(config.training)
        if self.run and is_run(self.run):
            model.load_state_dict(resume_federation(config, self.run, data).model.state_dict())
            optimizer = plain_sgd(config.training.lr)
        federation = few_clients(config, model, (own, victim), optimizer, max(first, size))
        leaks, observed = leaks_of(federation)
        search = self.options.search(federation.model)
        true = data.pixels(victim.tensor.to(federation.device))
        views = {}
        for number, (view, leak) in enumerate(leaks.items()):

            def share(part: float, number: int = number, view: str = view) -> None:
                progress((number + part) / len(leaks), view)

            started = time.process_time()
            chance = generator("gradients", seed, size, self.group)
            found = searched(leak, search, data, observed.inputs, size, chance, share)
            views[view] = judged(found, data, true, victim.targets.tolist(), started)
        below = floors(data, rows, true, generator("floors", seed, size, self.group))
        originals = [encoded(image) for image in true]
        return Batch(size, rows.tolist(), search, views, below, originals, shape_of(true[0]))


def searched(
    leak: Leak, search: Search, data: Data, own: Tensor, size: int, chance: torch.Generator, progress: Share
) -> Reconstruction:
    """The search from one leak; labels by rule for the methods that want them, pixels between black and white.

    `own` are records of the attacker's, which show it the usual outputs of the model.
    """
    labels = None
    if search.method != "dlg":
        guessed = [single_label(leak)] if size == 1 else batch_labels(leak, size, own)
        labels = torch.tensor(guessed, device=own.device)
    black, white = (data.scaled(own.new_full((1, own.shape[1], 1, 1), pixel))[0] for pixel in (0, 1))
    return reconstruct(
        leak,
        (size, *own.shape[1:]),
        search,
        classes=data.outputs,
        generator=chance,
        labels=labels,
        box=(black, white),
        progress=progress,
    )


def judged(found: Reconstruction, data: Data, true: Tensor, labels: Sequence[int], started: float) -> View:
    """How near a search came to the victim's batch, which it does not get."""
    pixels = data.pixels(found.inputs)
    pixels = pixels[match(pixels, true)]
    return View(
        **dataclasses.asdict(figures(pixels, true)),
        labels=shared_labels(found.labels.tolist(), labels),
        distance=found.distance if math.isfinite(found.distance) else None,
        broken=sum(not math.isfinite(distance) for distance in found.distances),
        seconds=time.process_time() - started,
        pictures=[encoded(image) for image in pixels],
    )


def plain_sgd(lr: float) -> MakeOptimizer:
    """A server of plain SGD."""
    return lambda parameters: torch.optim.SGD(parameters, lr)


def few_clients(
    config: Config,
    model: nn.Module,
    parts: Sequence[Part],
    optimizer: MakeOptimizer,
    batch_size: int,
    *,
    whole_shard: bool = False,
) -> Federation:
    """Clients with these records, and a server."""
    return Federation(
        move_to_device(model, config.training.device),
        [(part.tensor, part.targets) for part in parts],
        build_defence(config),
        optimizer,
        batch_size=batch_size,
        loss=build_loss(config.training),
        whole_shard=whole_shard,
        fuse=False,
        seed=config.training.seed,
    )


def leaks_of(federation: Federation) -> tuple[dict[str, Leak], Observed]:
    """One round of the federation: the gradients that it leaks, by view, and what the attacker observed.

    V-diff is what the attacker has by right. V-up is the victim's upload, a stress test. For a veil also its upload
    beside the true model, which no participant has: the pair behind the paper's figure. And what an attacker that knows
    the defence derives (`Record.leaks`), unless it does not apply.
    """
    true = copy.deepcopy(federation.model)
    rounds = watch(federation)
    after = observe(federation)
    observed = dataclasses.replace(after, rounds=(rounds[ATTACKER], *after.rounds))
    leaks = {
        "V-diff": from_difference(observed),
        "V-up": from_upload(rounds[ATTACKER], rounds[VICTIM].upload, observed.loss),
    }
    if isinstance(rounds[ATTACKER].broadcast, Broadcast):
        leaks[MISMATCHED] = dataclasses.replace(leaks["V-up"], model=true)
    record = record_of(innermost(federation.defence))
    for label, spec in record.leaks.items() if record else ():
        derive = cast(Callable[[Observed], Leak], imported(spec, "a leak", "my_package.attacks:derive"))
        with contextlib.suppress(DoesNotApply):
            leaks[label] = derive(observed)
    return leaks, observed


def figures(found: Tensor, true: Tensor) -> Figures:
    """The metrics of each image."""
    return Figures(psnr(found, true), ssim(found, true), mse(found, true))


def shared_labels(found: Sequence[int], true: Sequence[int]) -> int:
    """How many labels of a batch were found, whatever their order."""
    return sum(min(found.count(label), true.count(label)) for label in set(true))


def guesses(data: Data, rows: Tensor, chance: torch.Generator, taken: Tensor | None = None) -> dict[str, Tensor]:
    """Pixels that need no gradient: the mean image of the data set, and for each of the rows another of its class.

    Where a guess is compared with several records, none of those may be guessed: they are `taken`.
    """
    others = []
    for row in rows.tolist():
        same = (data.train.targets == data.train.targets[row]).nonzero()[:, 0]
        same = same[~torch.isin(same, torch.tensor(row) if taken is None else taken)]
        if not len(same):
            what = f"class {int(data.train.targets[row])} has no other record"
            raise BadArgument(data.name, what, "a larger --train-size")
        others.append(int(same[torch.randint(len(same), (), generator=chance)]))
    images = {"mean image": data.train.tensor.mean(0, keepdim=True), "another of its class": data.train.tensor[others]}
    return {name: data.pixels(inputs) for name, inputs in images.items()}


def floors(data: Data, rows: Tensor, true: Tensor, chance: torch.Generator) -> dict[str, Figures]:
    """How near guesses come to the images of the rows."""
    found = guesses(data, rows, chance)
    return {name: figures(images.to(true).expand_as(true), true) for name, images in found.items()}


class GradientStudy(OnDefences[Options, Gradients]):
    """A victim's images from a gradient; every batch is a job of its own."""

    name = "gradients"
    summary = "images from gradients (DLG, iDLG, Inverting Gradients)"
    options = Options
    defaults = {  # noqa: RUF012
        "data": "cifar10",
        "train_size": 1000,
        "clients": 2,
        "model": "lenet",
        "norm": "none",
        "loss": "cross_entropy",
        "optimizer": "sgd",
        "momentum": 0.0,
        "lr": 0.1,
    }

    def batches(self, asked: Asked[Options], defence: str, config: Config | None = None) -> dict[str, Job[Batch]]:
        """The jobs of one defence by batch; another configuration of it may be given."""
        config, options = config or asked.under(defence), asked.options
        found = {}
        for size in options.batches():
            for group in range(options.images // size):
                label = f"{asked.label}{defence}-batch{size}-{group}".replace(":", ".").replace(", ", "-")
                work = AttackBatch(config, options, asked.run, size, group)
                found[f"batch{size}-{group}"] = Job(label.replace(" ", "-"), work, Batch, attacked=asked.run)
        return found

    def jobs(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """All batches of all defences."""
        check(asked.config, asked.options, load_data(asked.config), asked.run)
        return [job for name in asked.defences for job in self.batches(asked, name).values()]

    def collect(self, asked: Asked[Options], folder: Path, done: Done) -> Results[Gradients]:
        """By defence."""
        seed = asked.config.training.seed
        return {
            name: Gradients(seed, {part: done[job] for part, job in self.batches(asked, name).items()})
            for name in asked.defences
        }

    def present(self, asked: Asked[Options], results: Results[Gradients]) -> Shown:
        """Table, chart of the smallest batch, pictures of every batch size."""
        sizes = sorted(asked.options.batches())
        verdict = page.verdict(results, sizes[0])
        return self.framed(asked, results, *page.presented(results, sizes), verdict=verdict)


GRADIENTS = GradientStudy()
