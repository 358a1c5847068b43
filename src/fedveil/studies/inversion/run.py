"""`fedveil attack inversion`: does the model that a client receives show what the private classes look like?

The federation trains on some classes (`--labels`), the attacker's public images are of all the others. The attack sees
the model, public images and the number of a class; evaluator and distances know the private images.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.generator import CODE, Gan, train_gan
from fedveil.attacks.inversion import on_pixels, search, search_pixels
from fedveil.data import Data, keep_labels, other_labels, parse_labels
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.federation.shards import generator
from fedveil.progress import Progress
from fedveil.runs.build import load_data
from fedveil.runs.config import Config
from fedveil.studies.attack import Asked, AttackStudy, Results, option
from fedveil.studies.basis import Basis
from fedveil.studies.federations import load_or_train, measure_quality
from fedveil.studies.inversion import page
from fedveil.studies.inversion.evaluator import Bench, look, per_class, train_judge
from fedveil.studies.inversion.page import PER_CLASS
from fedveil.studies.inversion.results import Counts, Gallery, Inversion, Inverted, TrainedEvaluator, TrainedGan
from fedveil.studies.jobs import Done, Job, Result
from fedveil.studies.observation import observe_strongest
from fedveil.studies.pictures import encode_image, image_shape
from fedveil.studies.study import Shown

WHERE = "fedveil attack inversion"
DATA = ("data", "path", "train_size", "test_size", "size", "labels", "seed", "device")


@dataclass(frozen=True)
class Options:
    """The attack's own flags."""

    codes: int = option(20, "reconstructions of each private class, shared among the broadcasts")
    broadcasts: int = option(4, "how often the last model is sent, with a new secret or sketch each time")
    steps: int = option(300, "steps of the search for a code; the original has 1500")
    restarts: int = option(2, "restarts of that search; the original has 5")
    pixel_steps: int = option(200, "steps of the search without a generator; 0 leaves it out")
    public_size: int = option(8000, "public images at most")
    gan_epochs: int = option(30, "epochs of the generator; the original has 100")
    gan_width: int = option(16, "width of the generator; the original has 64 for 32 x 32 images")
    gan_lr: float = option(1e-3, "learning rate of the generator; the original has 2e-4")
    judge_epochs: int = option(12, "epochs of the independent evaluator")
    judge_width: int = option(32, "width of the independent evaluator")

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to do."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in ("pixel_steps", "gan_lr") else 1
            if value < least:
                raise BadArgument(f"--{name.replace('_', '-')}", f"must be at least {least}, got {value}")
        if self.codes % self.broadcasts:
            raise BadArgument("--codes", f"{self.codes} cannot be shared among {self.broadcasts} broadcasts")


def data_of(config: Config) -> Config:
    """What of a configuration decides the images, so that generator and evaluator are kept when the rest changes."""
    flat = config.flat()
    return Config().changed(model="cnn", **{name: flat[name] for name in DATA})


def public_images(config: Config, most: int) -> Tensor:
    """Pixels of training images of the classes that the federation does not train on, at most so many."""
    data = load_data(config.changed(labels=None))
    others = other_labels(parse_labels(config.data.labels or "", len(data.classes)), len(data.classes))
    public = keep_labels(data, others)
    rows = torch.randperm(len(public.train.targets), generator=generator("public", config.training.seed))[:most]
    return public.pixels(public.train.tensor[rows]).to(config.training.device)


@dataclass(frozen=True)
class TrainGan:
    """Train the generator of public images; it is kept in the folder."""

    config: Config
    options: Options
    folder: Path

    def trained(self, basis: Basis, progress: Progress = lambda share, what: None) -> tuple[Gan, list[float], int]:
        """The generator, trained or from disk, its critic's distances, and the number of public images."""
        options = self.options
        images = public_images(self.config, options.public_size)
        gan, curve = train_gan(
            images,
            options.gan_epochs,
            width=options.gan_width,
            lr=options.gan_lr,
            seed=self.config.training.seed,
            path=self.folder / "gan.pt",
            asked=repr((data_of(self.config), options.public_size, basis.records)),
            progress=progress,
        )
        return gan, curve, len(images)

    def __call__(self, progress: Progress, done: Done) -> TrainedGan:
        """Train it."""
        begin = time.process_time()
        _, curve, images = self.trained(done.basis, progress)
        return TrainedGan(images, curve, time.process_time() - begin)


@dataclass(frozen=True)
class TrainEvaluator:
    """Train the independent evaluator on the private images; it is kept in the folder."""

    config: Config
    options: Options
    folder: Path

    def trained(self, data: Data, basis: Basis, progress: Progress = lambda share, what: None) -> nn.Module:
        """The network, trained or from disk."""
        return train_judge(
            data,
            self.options.judge_epochs,
            width=self.options.judge_width,
            seed=self.config.training.seed,
            device=self.config.training.device,
            path=self.folder / "judge.pt",
            asked=repr((data_of(self.config), basis.records)),
            progress=progress,
        )

    def __call__(self, progress: Progress, done: Done) -> TrainedEvaluator:
        """Train it, and test it on held-out images."""
        begin, data = time.process_time(), load_data(self.config)
        judge = self.trained(data, done.basis, progress)
        outputs, _ = look(judge, data.pixels(data.test.tensor).to(self.config.training.device))
        right = outputs.argmax(1).cpu() == data.test.targets
        return TrainedEvaluator(float(right.double().mean()), time.process_time() - begin)


@dataclass(frozen=True)
class Invert:
    """Reconstruct all private classes from one federation, by all attackers."""

    config: Config
    options: Options
    folder: Path
    run: Path

    def __call__(self, progress: Progress, done: Done) -> Inversion:
        """Search for images that each attacker's models take for a class, and judge them."""
        begin, config, options = time.process_time(), self.config, self.options
        federation, data = load_or_train(config, self.run, progress, done.basis)
        gan, _, public = TrainGan(config, options, self.folder).trained(done.basis)
        bench, classes = self.bench(data, done.basis), len(data.classes)
        wanted = torch.arange(classes, device=bench.device).repeat(options.codes)
        seen = [observe_strongest(federation, config.defence.name) for _ in range(options.broadcasts)]
        found: dict[str, Inverted] = {}
        pictures: dict[str, list[str]] = {}
        for name in seen[0]:
            models = [some[name].model for some in seen]
            made = self.reconstruct(progress, models, gan, data, wanted)
            received, true = (bench.self_judged(who, made["codes"], wanted) for who in (models, [federation.model]))
            judged = {how: bench.judged(images, wanted) for how, images in made.items()}
            found[name] = Inverted("V-out", judged["codes"], received, true, judged.get("pixels"))
            pictures |= {f"{name}, by {how}": first_of(images, wanted, classes) for how, images in made.items()}
        blind = without_model(gan, wanted, config.training.seed)
        real, labels = held_out(bench, wanted)
        shape, first = image_shape(data.train.tensor[0]), first_of(real, labels, classes)
        quality = measure_quality(federation, data)
        return Inversion(
            config.defence.name,
            config.training.seed,
            quality.train,
            quality.test,
            macro_accuracy(federation, data),
            list(data.classes),
            Counts(len(data.train.targets), public, len(wanted), options.broadcasts),
            found,
            bench.judged(blind, wanted),
            bench.judged(real, labels),
            time.process_time() - begin,
            Gallery(shape, first, first_of(blind, wanted, classes), pictures),
        )

    def bench(self, data: Data, basis: Basis) -> Bench:
        """The evaluator and what it sees in the private training images."""
        judge = TrainEvaluator(self.config, self.options, self.folder).trained(data, basis)
        device = torch.device(self.config.training.device)
        _, known = look(judge, data.pixels(data.train.tensor).to(device))
        norm = float(known.norm(dim=1).mean())
        return Bench(data, judge, known / norm, norm, device)

    def reconstruct(
        self, progress: Progress, models: Sequence[nn.Module], gan: Gan, data: Data, wanted: Tensor
    ) -> dict[str, Tensor]:
        """Images by the generator, and without it; of several models each gives its part of them."""
        made: dict[str, list[Tensor]] = {"codes": [], "pixels": []}
        options, shape = self.options, image_shape(data.train.tensor[0])
        for number, (view, part) in enumerate(zip(models, wanted.chunk(len(models)), strict=True)):
            model, seed = on_pixels(view, data.scaled), self.config.training.seed * len(models) + number

            def told(share: float, what: str, number: int = number) -> None:
                progress((number + share) / len(models), what)

            codes = search(model, gan, part, steps=options.steps, restarts=options.restarts, seed=seed, progress=told)
            made["codes"].append(codes.images)
            if options.pixel_steps:
                pixels = search_pixels(model, shape, part, steps=options.pixel_steps, seed=seed, progress=told)
                made["pixels"].append(pixels.images)
        return {how: torch.cat(images) for how, images in made.items() if images}


def macro_accuracy(federation: Federation, data: Data) -> float:
    """The server's model on held-out images, the mean over classes."""
    outputs, _ = look(federation.model, data.test.tensor.to(federation.device))
    shares = per_class(outputs.argmax(1).cpu(), data.test.targets, len(data.classes))
    there = [share for share in shares if share is not None]
    return sum(there) / len(there)


def first_of(images: Tensor, wanted: Tensor, classes: int) -> list[str]:
    """The first images of each class, class after class; grey where there are fewer."""
    found = []
    for label in range(classes):
        own = [encode_image(image) for image in images[wanted == label][:PER_CLASS]]
        found += own + [encode_image(torch.full_like(images[0], 0.5))] * (PER_CLASS - len(own))
    return found


def without_model(gan: Gan, wanted: Tensor, seed: int) -> Tensor:
    """As many images of the generator, for which no model was asked."""
    codes = torch.randn(len(wanted), CODE, generator=generator("floor", seed)).clamp(-1, 1)
    with torch.no_grad():
        images: Tensor = gan.generator(codes.to(wanted.device))
    return images


def held_out(bench: Bench, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Private images of the wanted classes that nobody trained on, at most as many, and their classes."""
    test, classes = bench.data.test, range(len(bench.data.classes))
    rows = torch.cat([(test.targets == label).nonzero()[:, 0][: int((wanted == label).sum())] for label in classes])
    return bench.data.pixels(test.tensor[rows]).to(bench.device), test.targets[rows].to(bench.device)


class InversionStudy(AttackStudy[Options, Inversion]):
    """What the private classes look like."""

    name = "inversion"
    summary = "what the classes that a federation trains on look like, by a generator of public images (GMI)"
    options = Options
    result = Inversion
    defaults = {  # noqa: RUF012
        "data": "cifar10",
        "labels": "first-half",
        "train_size": 10000,
        "test_size": 2000,
        "clients": 2,
        "model": "cnn",
        "width": 16,
        "lr": 2e-3,
        "epochs": 15,
    }

    def shared(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """Generator and evaluator; they depend on the data alone. Refuses a federation that leaves no class public."""
        config, fix = asked.config, "--labels first-half, and images; train the run with --labels too"
        if config.data.labels is None:
            raise BadArgument(WHERE, "the federation trains on all classes, so that no public one is left", fix)
        data = load_data(data_of(config.changed(labels=None)))
        private, classes = parse_labels(config.data.labels, len(data.classes)), len(data.classes)
        if len(private) < 2 or not other_labels(private, classes):
            what = f"labels {config.data.labels!r} leave {len(private)} of {classes} private"
            raise BadArgument(WHERE, what, fix)
        data.pixels(data.train.tensor[:1])  # refuses what is no image
        if config.model.name.startswith("mlp"):
            what = "an mlp takes rows of numbers, the generator makes images"
            raise BadArgument(WHERE, what, "--model cnn or resnet8")
        common = data_of(config), asked.options, folder
        return [
            Job(f"{asked.label}gan", TrainGan(*common), TrainedGan),
            Job(f"{asked.label}evaluator", TrainEvaluator(*common), TrainedEvaluator),
        ]

    def attack(self, asked: Asked[Options], defence: str, folder: Path) -> Invert:
        """See `Invert`."""
        return Invert(asked.under(defence), asked.options, folder, self.run_of(asked, defence, folder))

    def present(self, asked: Asked[Options], results: Results[Inversion]) -> Shown:
        """The table, success beside guessing, pictures, success by class, the paper's protocol, pixels alone."""
        return self.framed(asked, results, *page.presented(results), verdict=page.verdict(results))


INVERSION = InversionStudy()
