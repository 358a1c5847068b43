"""`fedveil attack inversion`: test whether the model that a client receives reveals what private classes look like.

The federation is trained on some classes (`--labels`). The attacker's public images come from the other classes. The
attack uses the model, public images and a class index; only the evaluation uses private images.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.inversion import CODE_SIZE, Gan, accept_pixels, search, search_pixels, train_gan
from fedveil.data import Data, keep_labels, other_labels, parse_labels
from fedveil.errors import BadArgument
from fedveil.progress import Progress, ignore_progress
from fedveil.records.shards import generator
from fedveil.runs.build import load_data
from fedveil.runs.settings import Config
from fedveil.studies.attack import AttackRequest, AttackStudy, option, read_federations
from fedveil.studies.basis import Basis
from fedveil.studies.federations import load_or_train, measure_quality, observe_strongest
from fedveil.studies.inversion import results as page
from fedveil.studies.inversion.evaluator import Evaluator, outputs_and_features, train_judge
from fedveil.studies.inversion.results import Counts, Gallery, Inversion, InversionFigures, TrainedEvaluator, TrainedGan
from fedveil.studies.jobs import JobResults, Result, StudyJob
from fedveil.studies.study import Presentation, encode_image

WHERE = "fedveil attack inversion"
DATA = ("data", "path", "train_size", "test_size", "size", "labels", "seed", "device")


@dataclass(frozen=True)
class InversionOptions:
    """Flags of the attack."""

    codes: int = option(20, "number of reconstructions of each private class, divided among the broadcasts")
    broadcasts: int = option(4, "number of broadcasts of the last model, each with new noise or a new sketch")
    steps: int = option(300, "number of search steps for a code; the original uses 1500")
    restarts: int = option(2, "number of restarts of the search for a code; the original uses 5")
    pixel_steps: int = option(200, "number of search steps without a generator; 0 to skip this search")
    public_size: int = option(8000, "maximum number of public images")
    gan_epochs: int = option(30, "number of training epochs of the generator; the original uses 100")
    gan_width: int = option(16, "width of the generator; the original uses 64 for 32 x 32 images")
    gan_lr: float = option(1e-3, "learning rate of the generator; the original uses 2e-4")
    judge_epochs: int = option(12, "number of training epochs of the independent evaluator")
    judge_width: int = option(32, "width of the independent evaluator")

    def __post_init__(self) -> None:
        """Refuse numbers that are too small, and codes that cannot be divided evenly among the broadcasts."""
        for name, value in dataclasses.asdict(self).items():
            minimum = 0 if name in ("pixel_steps", "gan_lr") else 1
            if value < minimum:
                raise BadArgument(f"--{name.replace('_', '-')}", f"must be at least {minimum}, got {value}")
        if self.codes % self.broadcasts:
            raise BadArgument("--codes", f"{self.codes} cannot be divided evenly among {self.broadcasts} broadcasts")


def data_config(config: Config) -> Config:
    """Return the part of a configuration that determines the images, and thus the generator and the evaluator."""
    flat = config.flat()
    return Config().changed(model="cnn", **{name: flat[name] for name in DATA})


def public_images(config: Config, limit: int) -> Tensor:
    """Return the pixels of at most `limit` training images from classes that the federation does not train on."""
    data = load_data(config.changed(labels=None))
    others = other_labels(parse_labels(config.data.labels or "", len(data.classes)), len(data.classes))
    public = keep_labels(data, others)
    rows = torch.randperm(len(public.train.targets), generator=generator("public", config.training.seed))[:limit]
    return public.pixels(public.train.tensor[rows]).to(config.training.device)


@dataclass(frozen=True)
class NetworkTraining:
    """Base class for job work that trains or loads the networks of an attack: the generator and the evaluator."""

    config: Config
    options: InversionOptions
    folder: Path

    def train_gan(self, basis: Basis, progress: Progress = ignore_progress) -> tuple[Gan, list[float], int]:
        """Train or load the generator; return it with the critic's distances and the number of public images."""
        options, seed, path = self.options, self.config.training.seed, self.folder / "gan.pt"
        images, width, lr = public_images(self.config, options.public_size), options.gan_width, options.gan_lr
        key = repr((data_config(self.config), options.public_size, basis.records))
        gan, curve = train_gan(
            images, options.gan_epochs, width=width, lr=lr, seed=seed, path=path, data_key=key, progress=progress
        )
        return gan, curve, len(images)

    def train_judge(self, data: Data, basis: Basis, progress: Progress = ignore_progress) -> nn.Module:
        """Train the evaluator on the private images, or load it."""
        epochs, width = self.options.judge_epochs, self.options.judge_width
        seed, device = self.config.training.seed, self.config.training.device
        path, key = self.folder / "judge.pt", repr((data_config(self.config), basis.records))
        return train_judge(data, epochs, width=width, seed=seed, device=device, path=path, key=key, progress=progress)


class TrainGan(NetworkTraining):
    """Job work that trains the generator on public images."""

    def __call__(self, progress: Progress, done: JobResults) -> TrainedGan:
        """Train the generator."""
        _, curve, images = self.train_gan(done.basis, progress)
        return TrainedGan(images, curve)


class TrainEvaluator(NetworkTraining):
    """Job work that trains the independent evaluator."""

    def __call__(self, progress: Progress, done: JobResults) -> TrainedEvaluator:
        """Train the evaluator and test it on held-out images."""
        data = load_data(self.config)
        judge = self.train_judge(data, done.basis, progress)
        outputs, _ = outputs_and_features(judge, data.pixels(data.test.tensor).to(self.config.training.device))
        right = outputs.argmax(1).cpu() == data.test.targets
        return TrainedEvaluator(float(right.double().mean()))


@dataclass(frozen=True)
class Invert(NetworkTraining):
    """Job work that reconstructs all private classes of one federation with each attacker."""

    run: Path

    def __call__(self, progress: Progress, done: JobResults) -> Inversion:
        """For each attacker, search for images of each class and evaluate them."""
        config, options = self.config, self.options
        federation, data = load_or_train(config, self.run, progress, done.basis)
        gan, _, public = self.train_gan(done.basis)
        evaluator, classes = self.evaluator(data, done.basis), len(data.classes)
        labels = torch.arange(classes, device=evaluator.device).repeat(options.codes)
        observations = [observe_strongest(federation, config.defence.name) for _ in range(options.broadcasts)]
        result: dict[str, InversionFigures] = {}
        pictures: dict[str, list[str]] = {}
        for name in observations[0]:
            models = [observed[name].model for observed in observations]
            reconstructions = self.reconstruct(progress, models, gan, data, labels)
            received, true = (
                evaluator.evaluate_by(evaluated, reconstructions["codes"], labels)
                for evaluated in (models, [federation.model])
            )
            judged = {how: evaluator.evaluate(images, labels) for how, images in reconstructions.items()}
            result[name] = InversionFigures(judged["codes"], received, true, judged.get("pixels"))
            pictures |= {
                f"{name}, by {how}": first_images(images, labels, classes) for how, images in reconstructions.items()
            }
        codes = torch.randn(len(labels), CODE_SIZE, generator=generator("floor", config.training.seed)).clamp(-1, 1)
        with torch.no_grad():
            model_free = gan.generator(codes.to(labels.device))  # images that do not depend on a model
        real, real_labels = held_out(evaluator, labels)
        shape, first = tuple(data.train.tensor.shape[1:]), first_images(real, real_labels, classes)
        gallery = Gallery(shape, first, first_images(model_free, labels, classes), pictures)
        quality = measure_quality(federation, data)
        counts = Counts(len(data.train.targets), public, len(labels), options.broadcasts)
        attacked = config.defence.name, config.training.seed, quality.train, quality.test, list(data.classes), counts
        floor, ceiling = evaluator.evaluate(model_free, labels), evaluator.evaluate(real, real_labels)
        return Inversion(*attacked, result, floor, ceiling, gallery)

    def evaluator(self, data: Data, basis: Basis) -> Evaluator:
        """Return the evaluator, with the features of the private training images."""
        judge = self.train_judge(data, basis)
        device = torch.device(self.config.training.device)
        _, known = outputs_and_features(judge, data.pixels(data.train.tensor).to(device))
        norm = float(known.norm(dim=1).mean())
        return Evaluator(data, judge, known / norm, norm, device)

    def reconstruct(
        self, progress: Progress, models: Sequence[nn.Module], gan: Gan, data: Data, labels: Tensor
    ) -> dict[str, Tensor]:
        """Reconstruct images with and without the generator; each model is used for an equal part of them."""
        reconstructions: dict[str, list[Tensor]] = {"codes": [], "pixels": []}
        options, shape = self.options, tuple(data.train.tensor.shape[1:])
        for number, (view, part) in enumerate(zip(models, labels.chunk(len(models)), strict=True)):
            model, seed = accept_pixels(view, data.standardise), self.config.training.seed * len(models) + number

            def report(fraction: float, step: str, number: int = number) -> None:
                progress((number + fraction) / len(models), step)

            codes = search(model, gan, part, steps=options.steps, restarts=options.restarts, seed=seed, progress=report)
            reconstructions["codes"].append(codes.images)
            if options.pixel_steps:
                pixels = search_pixels(model, shape, part, steps=options.pixel_steps, seed=seed, progress=report)
                reconstructions["pixels"].append(pixels.images)
        return {how: torch.cat(images) for how, images in reconstructions.items() if images}


def first_images(images: Tensor, labels: Tensor, classes: int) -> list[str]:
    """Return the first images of each class, padded with grey images if there are too few."""
    result = []
    for label in range(classes):
        encoded = [encode_image(image) for image in images[labels == label][: page.PER_CLASS]]
        result += encoded + [encode_image(torch.full_like(images[0], 0.5))] * (page.PER_CLASS - len(encoded))
    return result


def held_out(evaluator: Evaluator, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return held-out private images and their classes, at most as many per class as there are in `labels`."""
    test, classes = evaluator.data.test, range(len(evaluator.data.classes))
    rows = torch.cat([(test.targets == label).nonzero()[:, 0][: int((labels == label).sum())] for label in classes])
    return evaluator.data.pixels(test.tensor[rows]).to(evaluator.device), test.targets[rows].to(evaluator.device)


class InversionStudy(AttackStudy[InversionOptions, Inversion]):
    """The model inversion attack."""

    name = "inversion"
    summary = "reconstruct what a federation's private classes look like, with a generator of public images (GMI)"
    options = InversionOptions
    result = Inversion
    defaults = read_federations()["attack"]["inversion"]

    def shared(self, request: AttackRequest[InversionOptions], folder: Path) -> list[StudyJob[Result]]:
        """Return the jobs for the generator and the evaluator; refuse a federation without public classes."""
        config, fix = request.config, "use image data and --labels first-half; also train the run with --labels"
        if config.data.labels is None:
            raise BadArgument(WHERE, "the federation trains on all classes, so no class is public", fix)
        data = load_data(data_config(config.changed(labels=None)))
        private, classes = parse_labels(config.data.labels, len(data.classes)), len(data.classes)
        if len(private) < 2 or not other_labels(private, classes):
            what = f"labels {config.data.labels!r} make {len(private)} of {classes} classes private"
            raise BadArgument(WHERE, what, fix)
        data.pixels(data.train.tensor[:1])  # raises an error if records are not images
        if config.model.name.startswith("mlp"):
            what = "an mlp expects vectors, but the generator produces images"
            raise BadArgument(WHERE, what, "use --model cnn or resnet8")
        common = data_config(config), request.options, folder
        return [
            StudyJob(request.job_name("gan"), TrainGan(*common), TrainedGan),
            StudyJob(request.job_name("evaluator"), TrainEvaluator(*common), TrainedEvaluator),
        ]

    def attack(self, request: AttackRequest[InversionOptions], defence: str, folder: Path) -> Invert:
        """Return the work that attacks one defence."""
        return Invert(request.config_for(defence), request.options, folder, self.run_folder(request, defence, folder))

    def show(self, request: AttackRequest[InversionOptions], results: Mapping[str, Inversion]) -> Presentation:
        """Return the table, the chart, the pictures and the success rates by class."""
        return page.show(results)


INVERSION = InversionStudy()
