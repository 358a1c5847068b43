"""`fedveil attack gradients`: reconstruct a victim's images from a gradient, for each defence and view."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks import Observation
from fedveil.attacks.gradients import Progress as SearchProgress
from fedveil.attacks.gradients import Reconstruction, Search, reconstruct
from fedveil.attacks.leaked_gradients import Leak, batch_labels, from_difference, from_upload, single_label
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.registry import find_attackers
from fedveil.attacks.similarity import match, mse, psnr, ssim
from fedveil.data import Data, DataPart
from fedveil.defences.registry import find_record
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import (
    build_defence,
    build_loss,
    build_model,
    build_optimizer,
    build_privacy,
    load_data,
    move_to_device,
)
from fedveil.runs.folder import resume_federation
from fedveil.runs.settings import Config
from fedveil.scheme import Broadcast
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, join_parts, option, read_federations
from fedveil.studies.federations import ATTACKER, observe, observe_round
from fedveil.studies.gradients import results as page
from fedveil.studies.gradients.results import Batch, Gradients, ImageFigures, View
from fedveil.studies.jobs import JobResults, StudyJob
from fedveil.studies.study import JobGraph, Presentation, encode_image

VICTIM = 1
MISMATCHED = "true W, veiled upload"
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SEARCHES = {"cosine": (800, 2), "idlg": (150, 4)}  # default steps and restarts; dlg uses the values of idlg


@dataclass(frozen=True)
class SearchOptions:
    """Flags for a search by gradient matching."""

    method: str | None = option(None, "dlg, idlg or cosine; by default cosine if the network has a ReLU, else idlg")
    steps: int | None = option(None, "number of search steps; by default 800 for cosine, 150 for the others")
    restarts: int | None = option(None, "number of restarts of the search; by default 2 for cosine, 4 for the others")
    smooth: float = option(1e-2, "for cosine: weight of the total variation")

    def search(self, model: nn.Module) -> Search:
        """Return the settings from the flags; the defaults depend on the network."""
        has_relu = any(isinstance(module, nn.ReLU) for module in model.modules())
        method = self.method or ("cosine" if has_relu else "idlg")
        steps, restarts = SEARCHES["cosine" if method == "cosine" else "idlg"]
        return Search(method, self.steps or steps, self.restarts or restarts, smooth=self.smooth)


@dataclass(frozen=True)
class GradientOptions(SearchOptions):
    """Flags of the attack."""

    images: int = option(8, "number of the victim's images; for each batch size, only full batches are attacked")
    victim_batch: str = option("1,4,8", "sizes of the victim's batches, as a comma-separated list")

    def batches(self) -> list[int]:
        """Return the victim's batch sizes."""
        sizes = parse_counts(self.victim_batch)
        if not sizes or self.images < max(sizes):
            message = f"expected distinct sizes of at most {self.images}, got {self.victim_batch!r}"
            raise BadArgument("--victim-batch", message, "use sizes such as 1,4,8, or a larger --images")
        return sizes


def parse_counts(text: str) -> list[int]:
    """Parse a comma-separated list of distinct positive integers; return an empty list if it is not valid."""
    try:
        counts = [int(item) for item in text.split(",")]
    except ValueError:
        return []
    return counts if min(counts) > 0 and len(set(counts)) == len(counts) else []


def start_model(config: Config, data: Data, run: Path | None) -> nn.Module:
    """Return the latest model of a run or, if there is no run, a new network, as in the published attacks."""
    return resume_federation(config, run, data).model if run else build_model(config, data)


@dataclass(frozen=True)
class AttackBatch:
    """A task that trains for one round, and rebuilds one of the victim's batches from each leaked gradient."""

    config: Config
    options: GradientOptions
    run: Path | None
    size: int
    group: int

    def __call__(self, progress: Progress, results: JobResults) -> Batch:
        """Train for one round and attack the batch."""
        config, size, seed = self.config, self.size, self.config.training.seed
        data = load_data(config)
        order = torch.randperm(len(data.train.targets), generator=generator("gradients", seed))
        batch_size = config.training.batch_size
        rows = order[batch_size:][self.group * size : (self.group + 1) * size]
        own_part, victim_part = data.train.take(order[:batch_size]), data.train.take(rows)
        optimizer = plain_sgd(config.training.lr) if self.run else build_optimizer(config.training)
        model = start_model(config, data, self.run)
        federation = build_small_federation(config, model, (own_part, victim_part), optimizer, max(batch_size, size))
        leaks, observation = observe_leaks(federation)
        search = self.options.search(federation.model)
        originals = data.pixels(victim_part.tensor.to(federation.device))
        views = {}
        for index, (view, leak) in enumerate(leaks.items()):
            rng = generator("gradients", seed, size, self.group)
            report = part_progress(progress, index, len(leaks), view)
            result = search_leak(leak, search, data, observation.inputs, size, rng, report)
            views[view] = compare_images(result, data, originals, victim_part.targets.tolist())
        guess_figures = floors(data, rows, originals, generator("floors", seed, size, self.group))
        encoded_images = [encode_image(image) for image in originals]
        return Batch(size, rows.tolist(), search, views, guess_figures, encoded_images, tuple(originals[0].shape))


def part_progress(progress: Progress, part_index: int, count: int, step: str) -> SearchProgress:
    """Return a callback that reports the progress of part `part_index` of `count` equal parts."""
    return lambda fraction: progress((part_index + fraction) / count, step)


def search_leak(
    leak: Leak,
    search: Search,
    data: Data,
    own_inputs: Tensor,
    size: int,
    rng: torch.Generator,
    progress: SearchProgress,
) -> Reconstruction:
    """Reconstruct a batch from a leaked gradient, with valid pixel values; infer the labels if the search needs them.

    `own_inputs` are the attacker's own records, from which it estimates typical outputs of the model.
    """
    labels = None
    if search.method != "dlg":
        inferred = [single_label(leak)] if size == 1 else batch_labels(leak, size, own_inputs)
        labels = torch.tensor(inferred, device=own_inputs.device)
    black, white = (data.standardise(own_inputs.new_full((1, own_inputs.shape[1], 1, 1), pixel))[0] for pixel in (0, 1))
    shape, box = (size, *own_inputs.shape[1:]), (black, white)
    return reconstruct(
        leak, shape, search, classes=data.outputs, generator=rng, labels=labels, box=box, progress=progress
    )


def compare_images(reconstruction: Reconstruction, data: Data, originals: Tensor, labels: Sequence[int]) -> View:
    """Compare reconstructed images with the victim's batch."""
    pixels = data.pixels(reconstruction.inputs)
    pixels = pixels[match(pixels, originals)]
    similarities = (
        psnr(pixels, originals),
        ssim(pixels, originals),
        mse(pixels, originals),
        shared_labels(reconstruction.labels.tolist(), labels),
    )
    distance = reconstruction.distance if math.isfinite(reconstruction.distance) else None
    broken = sum(not math.isfinite(distance) for distance in reconstruction.distances)
    return View(*similarities, distance, broken, [encode_image(image) for image in pixels])


def plain_sgd(lr: float) -> MakeOptimizer:
    """Return a factory for plain SGD."""
    return lambda parameters: torch.optim.SGD(parameters, lr)


def build_small_federation(
    config: Config,
    model: nn.Module,
    parts: Sequence[DataPart],
    optimizer: MakeOptimizer,
    batch_size: int,
    *,
    whole_shard: bool = False,
) -> Federation:
    """Build a federation with one client for each part of the data."""
    return Federation(
        move_to_device(model, config.training.device),
        [(part.tensor, part.targets) for part in parts],
        build_defence(config),
        optimizer,
        privacy=build_privacy(config, max(len(part.targets) for part in parts)),
        batch_size=batch_size,
        loss=build_loss(config.training),
        whole_shard=whole_shard,
        fuse=False,
        seed=config.training.seed,
    )


def observe_leaks(federation: Federation) -> tuple[dict[str, Leak], Observation]:
    """Train for one round; return the leaked gradients by view, and the attacker's observation.

    V-diff is available to every client. V-up is the victim's update, which serves as a stress test. For a veil, there
    is also the update paired with the true model, as in the paper's figure; no participant has this pair. Finally,
    there are the leaks that an attacker derives with knowledge of the defence (`Attackers.leaks`), if they apply.
    """
    true_model = copy.deepcopy(federation.model)
    rounds = observe_round(federation)
    next_observation = observe(federation)
    observation = dataclasses.replace(next_observation, rounds=(rounds[ATTACKER], *next_observation.rounds))
    leaks = {
        "V-diff": from_difference(observation),
        "V-up": from_upload(rounds[ATTACKER], rounds[VICTIM].upload, observation.loss),
    }
    if isinstance(rounds[ATTACKER].broadcast, Broadcast):
        leaks[MISMATCHED] = dataclasses.replace(leaks["V-up"], model=true_model)
    record = find_record(federation.defence.base)
    for label, derive in find_attackers(record).leaks.items() if record else ():
        with contextlib.suppress(DoesNotApply):
            leaks[label] = derive(observation)
    return {label: leak.divide_by(rounds[VICTIM].reach) for label, leak in leaks.items()}, observation


def shared_labels(inferred_labels: Sequence[int], true_labels: Sequence[int]) -> int:
    """Return the number of labels in `true_labels` that were inferred, regardless of their order."""
    return sum(min(inferred_labels.count(label), true_labels.count(label)) for label in set(true_labels))


def guesses(data: Data, rows: Tensor, rng: torch.Generator, excluded: Tensor | None = None) -> dict[str, Tensor]:
    """Return guesses that need no gradient: the mean image, and for each row another record of the same class.

    If guesses are compared with several records, pass all of them as `excluded`, so that none of them is a guess.
    """
    same_class_rows = []
    for row in rows.tolist():
        same_class = (data.train.targets == data.train.targets[row]).nonzero()[:, 0]
        same_class = same_class[~torch.isin(same_class, torch.tensor(row) if excluded is None else excluded)]
        if not len(same_class):
            message = f"class {int(data.train.targets[row])} has no other record"
            raise BadArgument(data.name, message, "use a larger --train-size")
        same_class_rows.append(int(same_class[torch.randint(len(same_class), (), generator=rng)]))
    images = {
        "mean image": data.train.tensor.mean(0, keepdim=True),
        "another of its class": data.train.tensor[same_class_rows],
    }
    return {name: data.pixels(inputs) for name, inputs in images.items()}


def floors(data: Data, rows: Tensor, originals: Tensor, rng: torch.Generator) -> dict[str, ImageFigures]:
    """Return the similarity of guesses to the true images."""
    images_by_guess = {
        name: images.to(originals).expand_as(originals) for name, images in guesses(data, rows, rng).items()
    }
    return {
        name: ImageFigures(psnr(guess, originals), ssim(guess, originals), mse(guess, originals))
        for name, guess in images_by_guess.items()
    }


class GradientStudy(AttackStudy[GradientOptions, Gradients]):
    """Reconstruction of a victim's images from a gradient, with one job per batch."""

    name = "gradients"
    summary = "reconstruct images from gradients (DLG, iDLG, Inverting Gradients)"
    options = GradientOptions
    defaults = read_federations()["attack"]["gradients"]

    def check(self, request: AttackRequest[GradientOptions]) -> None:
        """Refuse a federation that cannot be attacked."""
        data, training = load_data(request.config), request.config.training
        data.pixels(data.train.tensor[:1])
        if not data.classes:
            raise BadArgument(data.name, "it has no classes, but the attack needs labels", "use --data cifar10")
        records, required = len(data.train.targets), training.batch_size + request.options.images
        if records < required:
            message = f"there are {records} training records, but the attacker and the victim need {required}"
            raise BadArgument(data.name, message, "use a larger --train-size or a smaller --images")
        is_supported = training.optimizer == "adam" or (training.optimizer == "sgd" and not training.momentum)
        if not request.run and (not is_supported or training.weight_decay):
            message = "the difference between two models reveals the gradient or its signs only with plain SGD or Adam"
            raise BadArgument("--optimizer", message, "use --optimizer sgd --momentum 0, or adam, and --weight-decay 0")

    def batches(self, request: AttackRequest[GradientOptions], name: str, config: Config) -> dict[str, StudyJob[Batch]]:
        """Return one job per batch; `name` is the name of a defence or of a variant of a defence."""
        options, result = request.options, dict[str, StudyJob[Batch]]()
        for size in options.batches():
            for group in range(options.images // size):
                task, part = AttackBatch(config, options, request.run, size, group), f"batch{size}-{group}"
                result[part] = StudyJob(request.job_name(name, part), task, Batch, attacked_run=request.run)
        return result

    def graph(self, request: AttackRequest[GradientOptions], folder: Path) -> JobGraph[Results[Gradients]]:
        """Return one job per defence and batch."""
        self.check(request)
        jobs = {name: self.batches(request, name, request.config_for(name)) for name in request.defences}
        return join_parts(jobs, lambda parts: Gradients(request.config.training.seed, parts))

    def show(self, request: AttackRequest[GradientOptions], results: Mapping[str, Gradients]) -> Presentation:
        """Return the table, a chart for the smallest batch, and pictures for every batch size."""
        return page.show(results, sorted(request.options.batches()))


GRADIENTS = GradientStudy()
