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

COMMAND = "fedveil attack inversion"
DATA_KEYS = ("data", "path", "train_size", "test_size", "size", "labels", "seed", "device")


@dataclass(frozen=True)
class InversionOptions:
    """Flags of the attack."""

    codes: int = option(20, "number of reconstructions of each private class, divided among the broadcasts")
    broadcasts: int = option(4, "number of broadcasts of the last model, each with new noise or a new sketch")
    steps: int = option(300, "number of search steps for a code; the original attack uses 1500")
    restarts: int = option(2, "number of restarts of the search for a code; the original attack uses 5")
    pixel_steps: int = option(200, "number of search steps without a generator; 0 to skip this search")
    public_size: int = option(8000, "maximum number of public images")
    gan_epochs: int = option(30, "number of training epochs of the generator; the original attack uses 100")
    gan_width: int = option(16, "width of the generator; the original attack uses 64 for 32 x 32 images")
    gan_lr: float = option(1e-3, "learning rate of the generator; the original attack uses 2e-4")
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
    values = config.flat()
    return Config().changed(model="cnn", **{name: values[name] for name in DATA_KEYS})


def public_images(config: Config, limit: int) -> Tensor:
    """Return the pixels of at most `limit` training images from classes that the federation does not train on."""
    data = load_data(config.changed(labels=None))
    public_labels = other_labels(parse_labels(config.data.labels or "", len(data.classes)), len(data.classes))
    public = keep_labels(data, public_labels)
    rows = torch.randperm(len(public.train.targets), generator=generator("public", config.training.seed))[:limit]
    return public.pixels(public.train.tensor[rows]).to(config.training.device)


@dataclass(frozen=True)
class NetworkTraining:
    """Base class for tasks that train or load the networks of an attack: the generator and the evaluator."""

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
    """A task that trains the generator on public images."""

    def __call__(self, progress: Progress, results: JobResults) -> TrainedGan:
        """Train the generator."""
        _, curve, images = self.train_gan(results.basis, progress)
        return TrainedGan(images, curve)


class TrainEvaluator(NetworkTraining):
    """A task that trains the independent evaluator."""

    def __call__(self, progress: Progress, results: JobResults) -> TrainedEvaluator:
        """Train the evaluator and test it on held-out images."""
        data = load_data(self.config)
        judge = self.train_judge(data, results.basis, progress)
        outputs, _ = outputs_and_features(judge, data.pixels(data.test.tensor).to(self.config.training.device))
        is_hit = outputs.argmax(1).cpu() == data.test.targets
        return TrainedEvaluator(float(is_hit.double().mean()))


@dataclass(frozen=True)
class Invert(NetworkTraining):
    """A task that reconstructs all private classes of one federation with each attacker."""

    run: Path

    def __call__(self, progress: Progress, results: JobResults) -> Inversion:
        """Search for images of each class with each attacker, and evaluate them."""
        config, options = self.config, self.options
        federation, data = load_or_train(config, self.run, progress, results.basis)
        gan, _, public = self.train_gan(results.basis)
        evaluator, classes = self.evaluator(data, results.basis), len(data.classes)
        labels = torch.arange(classes, device=evaluator.device).repeat(options.codes)
        observations = [observe_strongest(federation, config.defence.name) for _ in range(options.broadcasts)]
        result: dict[str, InversionFigures] = {}
        pictures: dict[str, list[str]] = {}
        for name in observations[0]:
            models = [observation[name].model for observation in observations]
            reconstructions = self.reconstruct(progress, models, gan, data, labels)
            received_rate, true_rate = (
                evaluator.evaluate_by(judges, reconstructions["codes"], labels)
                for judges in (models, [federation.model])
            )
            rates = {method: evaluator.evaluate(images, labels) for method, images in reconstructions.items()}
            result[name] = InversionFigures(rates["codes"], received_rate, true_rate, rates.get("pixels"))
            pictures |= {
                f"{name}, by {method}": first_images(images, labels, classes)
                for method, images in reconstructions.items()
            }
        codes = torch.randn(len(labels), CODE_SIZE, generator=generator("floor", config.training.seed)).clamp(-1, 1)
        with torch.no_grad():
            model_free = gan.generator(codes.to(labels.device))  # images that do not depend on a model
        held_out_images, held_out_labels = select_held_out(evaluator, labels)
        shape, held_out_pictures = (
            tuple(data.train.tensor.shape[1:]),
            first_images(held_out_images, held_out_labels, classes),
        )
        gallery = Gallery(shape, held_out_pictures, first_images(model_free, labels, classes), pictures)
        quality = measure_quality(federation, data)
        counts = Counts(len(data.train.targets), public, len(labels), options.broadcasts)
        description = config.defence.name, config.training.seed, quality.train, quality.test, list(data.classes), counts
        floor, ceiling = evaluator.evaluate(model_free, labels), evaluator.evaluate(held_out_images, held_out_labels)
        return Inversion(*description, result, floor, ceiling, gallery)

    def evaluator(self, data: Data, basis: Basis) -> Evaluator:
        """Return the evaluator, with the features of the private training images."""
        judge = self.train_judge(data, basis)
        device = torch.device(self.config.training.device)
        _, features = outputs_and_features(judge, data.pixels(data.train.tensor).to(device))
        norm = float(features.norm(dim=1).mean())
        return Evaluator(data, judge, features / norm, norm, device)

    def reconstruct(
        self, progress: Progress, models: Sequence[nn.Module], gan: Gan, data: Data, labels: Tensor
    ) -> dict[str, Tensor]:
        """Reconstruct images with and without the generator; each model is used for an equal part of the images."""
        reconstructions: dict[str, list[Tensor]] = {"codes": [], "pixels": []}
        options, shape = self.options, tuple(data.train.tensor.shape[1:])
        for index, (view, part) in enumerate(zip(models, labels.chunk(len(models)), strict=True)):
            model, seed = accept_pixels(view, data.standardise), self.config.training.seed * len(models) + index

            def report(fraction: float, step: str, index: int = index) -> None:
                progress((index + fraction) / len(models), step)

            codes = search(model, gan, part, steps=options.steps, restarts=options.restarts, seed=seed, progress=report)
            reconstructions["codes"].append(codes.images)
            if options.pixel_steps:
                pixels = search_pixels(model, shape, part, steps=options.pixel_steps, seed=seed, progress=report)
                reconstructions["pixels"].append(pixels.images)
        return {method: torch.cat(images) for method, images in reconstructions.items() if images}


def first_images(images: Tensor, labels: Tensor, classes: int) -> list[str]:
    """Return the first images of each class, padded with grey images if there are too few."""
    result = []
    for label in range(classes):
        encoded_images = [encode_image(image) for image in images[labels == label][: page.PER_CLASS]]
        result += encoded_images + [encode_image(torch.full_like(images[0], 0.5))] * (
            page.PER_CLASS - len(encoded_images)
        )
    return result


def select_held_out(evaluator: Evaluator, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return held-out private images and their classes; `labels` limits the number of images of each class."""
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

    def shared_jobs(self, request: AttackRequest[InversionOptions], folder: Path) -> list[StudyJob[Result]]:
        """Return the jobs for the generator and the evaluator; refuse a federation without public classes."""
        config, fix = request.config, "use image data and --labels first-half, and train the run with the same --labels"
        if config.data.labels is None:
            raise BadArgument(COMMAND, "the federation trains on all classes, so no class is public", fix)
        data = load_data(data_config(config.changed(labels=None)))
        private_labels, classes = parse_labels(config.data.labels, len(data.classes)), len(data.classes)
        if len(private_labels) < 2 or not other_labels(private_labels, classes):
            message = f"labels {config.data.labels!r} make {len(private_labels)} of {classes} classes private"
            raise BadArgument(COMMAND, message, fix)
        data.pixels(data.train.tensor[:1])  # raises an error if records are not images
        if config.model.name.startswith("mlp"):
            message = "an mlp expects vectors, but the generator produces images"
            raise BadArgument(COMMAND, message, "use --model cnn or resnet8")
        arguments = data_config(config), request.options, folder
        return [
            StudyJob(request.job_name("gan"), TrainGan(*arguments), TrainedGan),
            StudyJob(request.job_name("evaluator"), TrainEvaluator(*arguments), TrainedEvaluator),
        ]

    def attack(self, request: AttackRequest[InversionOptions], defence: str, folder: Path) -> Invert:
        """Return the task that attacks one defence."""
        return Invert(request.config_for(defence), request.options, folder, self.run_folder(request, defence, folder))

    def show(self, request: AttackRequest[InversionOptions], results: Mapping[str, Inversion]) -> Presentation:
        """Return the table, the chart, the pictures and the success rates by class."""
        return page.show(results)


INVERSION = InversionStudy()
