"""`fedveil attack inversion`: does the model that a client is sent show what the private classes look like?

The federation trains on some classes (`--labels`), the attacker's public images are of all the others. The attack sees
the model, public images and the number of a class; judge and distances know the private images.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.attacks.adaptive import STRONGEST
from fedveil.attacks.generator import CODE, Gan, train_gan
from fedveil.attacks.inversion import on_pixels, search, search_pixels
from fedveil.data import Data, keep_labels, other_labels, parse_labels
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.local import Federation
from fedveil.federation.shards import generator
from fedveil.runs.config import Config, load_data
from fedveil.studies.attack import Experiment
from fedveil.studies.inversion.evaluator import Bench, look, per_class, train_judge
from fedveil.studies.inversion.page import present, shown_images
from fedveil.studies.jobs import Cell, Result, Tell
from fedveil.studies.victim import observe_all, scene_of, trained

DATA = ("data", "path", "train_size", "test_size", "size", "labels", "seed", "device")


@dataclass(frozen=True)
class Settings:
    """The attack's own flags.

    Attributes:
        codes: reconstructions of each private class.
        broadcasts: how often the last model is sent, with another secret or sketch each time; every broadcast is
            attacked for itself and gives its part of the reconstructions.
        steps, restarts: of the search for a code; the original has 1500 and 5.
        pixel_steps: of the control without a generator; 0 leaves it out.
        public_size: public images at most.
        gan_epochs, gan_width, gan_lr: of the generator; the original has 100, 64 and 2e-4 for 32 x 32 images.
        judge_epochs, judge_width: of the judge.
    """

    codes: int = 20
    broadcasts: int = 4
    steps: int = 300
    restarts: int = 2
    pixel_steps: int = 200
    public_size: int = 8000
    gan_epochs: int = 30
    gan_width: int = 16
    gan_lr: float = 1e-3
    judge_epochs: int = 12
    judge_width: int = 32

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to do."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in ("pixel_steps", "gan_lr") else 1
            if value < least:
                raise BadArgument(f"--{name.replace('_', '-')}", f"must be at least {least}, got {value}")
        if self.codes % self.broadcasts:
            raise BadArgument("--codes", f"{self.codes} cannot be shared among {self.broadcasts} broadcasts")


def data_of(config: Config) -> Config:
    """What of a configuration decides the images, so that generator and judge are kept when the rest changes."""
    return Config(model="cnn", **{name: getattr(config, name) for name in DATA})


def public_images(config: Config, most: int) -> Tensor:
    """Pixels of training images of the classes that the federation does not train on, at most so many."""
    data = load_data(dataclasses.replace(config, labels=None))
    others = other_labels(parse_labels(config.labels or "", len(data.classes)), len(data.classes))
    public = keep_labels(data, others)
    rows = torch.randperm(len(public.train.targets), generator=generator("public", config.seed))[:most]
    return public.pixels(public.train.tensor[rows]).to(config.device)


def gan_of(tell: Tell, config: Config, settings: Settings, folder: Path) -> tuple[Gan, list[float], int]:
    """The generator, trained or from disk, its critic's distances, and the number of public images."""
    images = public_images(config, settings.public_size)
    gan, curve = train_gan(
        images,
        settings.gan_epochs,
        width=settings.gan_width,
        lr=settings.gan_lr,
        seed=config.seed,
        path=folder / "gan.pt",
        asked=repr((data_of(config), settings.public_size)),
        tell=tell,
    )
    return gan, curve, len(images)


def judge_of(tell: Tell, config: Config, settings: Settings, folder: Path, data: Data) -> nn.Module:
    """The judge, trained or from disk; only colour images are mirrored, since digits are not themselves in a mirror."""
    images = data.pixels(data.train.tensor).to(config.device)
    return train_judge(
        images,
        data.train.targets.to(config.device),
        settings.judge_epochs,
        classes=len(data.classes),
        width=settings.judge_width,
        flip=images.shape[1] == 3,
        seed=config.seed,
        path=folder / "judge.pt",
        asked=repr(data_of(config)),
        tell=tell,
    )


def gan_cell(tell: Tell, config: Config, settings: Settings, folder: Path) -> Result:
    """Train the generator."""
    begin = time.process_time()
    _, curve, images = gan_of(tell, config, settings, folder)
    return {"images": images, "distances": curve, "cpu_seconds": time.process_time() - begin}


def judge_cell(tell: Tell, config: Config, settings: Settings, folder: Path) -> Result:
    """Train the judge."""
    begin, data = time.process_time(), load_data(config)
    judge = judge_of(tell, config, settings, folder, data)
    outputs, _ = look(judge, data.pixels(data.test.tensor).to(config.device))
    right = outputs.argmax(1).cpu() == data.test.targets
    return {"accuracy": float(right.double().mean()), "cpu_seconds": time.process_time() - begin}


def shared_cells(config: Config, settings: Settings, defences: Sequence[str], folder: Path) -> list[Cell]:
    """Generator and judge; they depend on the data alone. Refuses a federation that leaves no class public."""
    where, fix = "fedveil attack inversion", "--labels first-half, and images; train the run with --labels too"
    if config.labels is None:
        raise BadArgument(where, "the federation trains on all classes, so that no public one is left", fix)
    data = load_data(data_of(dataclasses.replace(config, labels=None)))
    private = parse_labels(config.labels, len(data.classes))
    if len(private) < 2 or not other_labels(private, len(data.classes)):
        raise BadArgument(where, f"labels {config.labels!r} leave {len(private)} of {len(data.classes)} private", fix)
    data.pixels(data.train.tensor[:1])  # refuses what is no image
    if config.model.startswith("mlp"):
        raise BadArgument(where, "an mlp takes rows of numbers, the generator makes images", "--model cnn or resnet8")
    common = {"config": data_of(config), "settings": settings, "folder": folder}
    return [Cell("gan", gan_cell, common), Cell("judge", judge_cell, common)]


def bench_of(config: Config, settings: Settings, folder: Path, data: Data) -> Bench:
    """The judge and what it sees in the private training images."""
    judge = judge_of(lambda share, what: None, config, settings, folder, data)
    device = torch.device(config.device)
    _, known = look(judge, data.pixels(data.train.tensor).to(device))
    norm = float(known.norm(dim=1).mean())
    return Bench(data, judge, known / norm, norm, device)


def need(folder: Path) -> None:
    """Refuse to attack where generator or judge could not be trained."""
    for name in ("gan", "judge"):
        file = folder / "shared" / f"{name}.json"
        found = json.loads(file.read_text())["result"] if file.exists() else {"failed": "it was not trained"}
        if "failed" in found:
            raise BadArgument(f"inversion, {name}", found["failed"])


def attack(tell: Tell, config: Config, settings: Settings, folder: Path, run: Path) -> Result:
    """Reconstruct all private classes from one federation, by all attackers."""
    begin = time.process_time()
    need(folder)
    federation, data = trained(config, run, tell)
    gan, _, public = gan_of(lambda share, what: None, config, settings, folder)
    bench = bench_of(config, settings, folder, data)
    classes = torch.arange(len(data.classes), device=bench.device)
    wanted = classes.repeat(settings.codes)
    strongest = tuple(STRONGEST.values())
    seen = [observe_all(federation, config.defence, strongest) for _ in range(settings.broadcasts)]
    found: dict[str, Any] = {}
    pictures: dict[str, Tensor] = {}
    for name in seen[0]:
        models = [some[name].model for some in seen]
        made = reconstruct(tell, models, gan, data, wanted, config, settings)
        measured = {how: bench.judged(images, wanted) for how, images in made.items()}
        own = {
            "as_sent": bench.self_judged(models, made["codes"], wanted),
            "true_model": bench.self_judged([federation.model], made["codes"], wanted),
        }
        found[name] = {"view": "V-out", **measured, **own}
        shown = {how: shown_images(images, wanted, len(classes)) for how, images in made.items()}
        pictures |= {f"{name}, by {how}": images for how, images in shown.items()}
    limits, beside = floor_and_ceiling(gan, bench, wanted, config.seed)
    checkpoint.save(folder / "pictures" / f"{config.defence}.pt", {"made": pictures, **beside})
    sizes = {"members": len(data.train.targets), "public": public, "reconstructions": len(wanted)}
    return {
        "defence": config.defence,
        "seed": config.seed,
        **utility(federation, data),
        "classes": list(data.classes),
        "records": {**sizes, "broadcasts": settings.broadcasts},
        "attackers": found,
        **limits,
        "cpu_seconds": time.process_time() - begin,
    }


def reconstruct(
    tell: Tell,
    models: Sequence[nn.Module],
    gan: Gan,
    data: Data,
    wanted: Tensor,
    config: Config,
    settings: Settings,
) -> dict[str, Tensor]:
    """Images by the generator, and by the control without it; of several models each gives its part of them."""
    made: dict[str, list[Tensor]] = {}
    channels, height, width = data.train.tensor.shape[1:]
    for number, (view, part) in enumerate(zip(models, wanted.chunk(len(models)), strict=True)):
        model, seed = on_pixels(view, data.scaled), config.seed * len(models) + number

        def told(share: float, what: str, number: int = number) -> None:
            tell((number + share) / len(models), what)

        steps, restarts = settings.steps, settings.restarts
        codes = search(model, gan, part, steps=steps, restarts=restarts, seed=seed, tell=told)
        made.setdefault("codes", []).append(codes.images)
        if settings.pixel_steps:
            steps, shape = settings.pixel_steps, (channels, height, width)
            pixels = search_pixels(model, shape, part, steps=steps, seed=seed, tell=told)
            made.setdefault("pixels", []).append(pixels.images)
    return {how: torch.cat(images) for how, images in made.items()}


def utility(federation: Federation, data: Data) -> dict[str, Any]:
    """The server's model on members and held-out images; `macro` is the mean over classes of the held-out share."""
    scene = scene_of(federation, data)
    outputs, _ = look(federation.model, data.test.tensor.to(federation.device))
    shares = per_class(outputs.argmax(1).cpu(), data.test.targets, len(data.classes))
    there = [share for share in shares if share is not None]
    return {"train": scene.train, "test": scene.test, "macro": sum(there) / len(there)}


def floor_and_ceiling(gan: Gan, bench: Bench, wanted: Tensor, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The generator without any model, and held-out images of the wanted classes: as the judge sees them, and shown."""
    random = generator("floor", seed)
    with torch.no_grad():
        blind = gan.generator(torch.randn(len(wanted), CODE, generator=random).clamp(-1, 1).to(bench.device))
    test = bench.data.test
    pixels, targets = bench.data.pixels(test.tensor), test.targets
    real, known = [], []
    for label in range(len(bench.data.classes)):
        rows = (targets == label).nonzero()[:, 0]
        real.append(pixels[rows[: int((wanted == label).sum())]])
        known.append(torch.full((len(real[-1]),), label))
    images, labels = torch.cat(real).to(bench.device), torch.cat(known).to(bench.device)
    classes = len(bench.data.classes)
    pictures = {"real": shown_images(images, labels, classes), "floor": shown_images(blind, wanted, classes)}
    return {"floor": bench.judged(blind, wanted), "ceiling": bench.judged(images, labels)}, pictures


DEFAULTS: Mapping[str, Any] = {
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

INVERSION = Experiment(
    name="inversion",
    summary="what the classes that a federation trains on look like, by a generator of public images (GMI)",
    defaults=DEFAULTS,
    settings=Settings,
    trains=True,
    shared=shared_cells,
    attack=attack,
    present=present,
)
