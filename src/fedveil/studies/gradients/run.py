"""`fedveil attack gradients`: a victim's images from a gradient, under each defence, seen in two ways."""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.attacks import Observed, Round
from fedveil.attacks.gradients import METHODS, Search, reconstruct
from fedveil.attacks.labels import batch_labels, single_label
from fedveil.attacks.leaks import Leak, from_difference, from_upload, received
from fedveil.attacks.similarity import match, mse, psnr, ssim
from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.federation.shards import generator
from fedveil.runs.config import Config, build_defence, build_loss, build_model, load_data
from fedveil.runs.folder import open_run
from fedveil.studies.attack import Experiment
from fedveil.studies.gradients.page import encoded, present
from fedveil.studies.jobs import Cell, Result, Tell, run_cells
from fedveil.studies.victim import ATTACKER, observe

VICTIM = 1
MISMATCHED = "true W, veiled upload"
SEARCHES = {"cosine": (800, 2), "idlg": (150, 4), "dlg": (150, 4)}


@dataclass(frozen=True)
class GradientSettings:
    """The attack's own flags.

    Attributes:
        images: of the victim; each batch size takes as many of them as fill whole batches.
        victim_batch: records in the victim's batch, with commas between them.
        method: "dlg", "idlg" or "cosine"; by default "cosine" if the network has a ReLU, else "idlg".
        steps, restarts: of a search; by default 800 and 2 for "cosine", 150 and 4 for the others.
        smooth: weight of the total variation ("cosine").
    """

    images: int = 8
    victim_batch: str = "1,4,8"
    method: str | None = None
    steps: int | None = None
    restarts: int | None = None
    smooth: float = 1e-2

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

    def search(self, model: nn.Module) -> Search:
        """The method that suits a network, with what was asked for in place of its defaults."""
        kinked = any(isinstance(module, nn.ReLU) for module in model.modules())
        method = self.method or ("cosine" if kinked else "idlg")
        if method not in METHODS:
            raise BadArgument("--method", f"there is no method {method!r}", " or ".join(METHODS))
        steps, restarts = SEARCHES[method]
        return Search(method, self.steps or steps, self.restarts or restarts, smooth=self.smooth)


def attack(tell: Tell, config: Config, settings: GradientSettings, folder: Path, run: Path) -> Result:
    """All batch sizes against config.defence; every batch's result is kept as soon as it is there."""
    data = load_data(config)
    check(config, settings, data, run)
    cells = [
        Cell(
            f"batch{size}-{group}",
            attack_batch,
            {"config": config, "settings": settings, "data": data, "run": run, "size": size, "group": group},
        )
        for size in settings.batches()
        for group in range(settings.images // size)
    ]
    done: dict[str, float] = {}

    def show(name: str, share: float, what: str) -> None:
        done[name] = share
        tell(sum(done.values()) / len(cells), f"{name}, {what}")

    parts = run_cells(cells, folder / config.defence / "parts", workers=1, show=show)
    return {"seed": config.seed, "parts": {name: without_pictures(part) for name, part in parts.items()}}


def check(config: Config, settings: GradientSettings, data: Data, run: Path) -> None:
    """Refuse what the protocol cannot do."""
    data.pixels(data.train.tensor[:1])
    if not data.classes:
        raise BadArgument(data.name, "it has no classes, and labels are part of the attack", "--data cifar10")
    wanted = config.batch_size + settings.images
    if len(data.train.targets) < wanted:
        what = f"{len(data.train.targets)} training records, the attacker and the victim need {wanted}"
        raise BadArgument(data.name, what, "a larger --train-size, or fewer --images")
    plain = config.optimizer == "sgd" and not config.momentum and not config.weight_decay
    if not is_run(run) and not plain:
        what = "the difference of two models is the gradient of one round for a server of plain SGD"
        raise BadArgument("--optimizer", what, "--optimizer sgd --momentum 0 --weight-decay 0")


def is_run(run: Path) -> bool:
    """Whether a trained federation is attacked, not a fresh network."""
    return (run / "checkpoint.pt").exists()


def without_pictures(part: Result) -> Result:
    """A part's figures alone."""
    if "failed" in part:
        return part
    views = {
        view: {key: value for key, value in found.items() if key != "pictures"} for view, found in part["views"].items()
    }
    return {key: value for key, value in part.items() if key != "originals"} | {"views": views}


def attack_batch(
    tell: Tell, config: Config, settings: GradientSettings, data: Data, run: Path, size: int, group: int
) -> Result:
    """One batch of the victim: a round of the federation, and a search for every gradient that it leaks."""
    order = torch.randperm(len(data.train.targets), generator=generator("gradients", config.seed))
    own, rows = order[: config.batch_size], order[config.batch_size :][group * size : (group + 1) * size]
    federation = two_clients(config, data, own, rows, run)
    leaks, observed = leaks_of(federation)
    search = settings.search(federation.model)
    inputs, labels = (part[rows].to(federation.device) for part in (data.train.tensor, data.train.targets))
    views = {}
    for number, (view, leak) in enumerate(leaks.items()):

        def share(part: float, number: int = number, view: str = view) -> None:
            tell((number + part) / len(leaks), view)

        chance = generator("gradients", config.seed, size, group)
        views[view] = attack_view(leak, search, data, observed.inputs, (inputs, labels), chance, share)
    true = data.pixels(inputs)
    return {
        "size": size,
        "rows": rows.tolist(),
        "search": dataclasses.asdict(search),
        "views": views,
        "floors": floors(data, rows, true, generator("floors", config.seed, size, group)),
        "originals": [encoded(image) for image in true],
        "shape": list(true.shape[1:]),
    }


def attack_view(
    leak: Leak,
    search: Search,
    data: Data,
    own: Tensor,
    victim: tuple[Tensor, Tensor],
    chance: torch.Generator,
    tell: Callable[[float], None],
) -> Result:
    """The search from one leak, and how near it came to the victim's batch, which the search does not get."""
    started = time.process_time()
    shape, size = tuple(victim[0].shape), len(victim[0])
    found = reconstruct(
        leak,
        shape,
        search,
        classes=data.outputs,
        generator=chance,
        labels=given_labels(leak, search, size, own),
        box=box_of(data, own),
        tell=tell,
    )
    pixels, true = data.pixels(found.inputs), data.pixels(victim[0])
    pixels = pixels[match(pixels, true)]
    return {
        **figures(pixels, true),
        "labels": shared_labels(found.labels.tolist(), victim[1].tolist()),
        "distance": found.distance if math.isfinite(found.distance) else None,
        "broken": sum(not math.isfinite(distance) for distance in found.distances),
        "seconds": time.process_time() - started,
        "pictures": [encoded(image) for image in pixels],
    }


def two_clients(config: Config, data: Data, own: Tensor, rows: Tensor, run: Path) -> Federation:
    """The attacker with its records and the victim with its batch, and a server of plain SGD.

    The model is a run's last one, or fresh: the state in which gradient inversion is published.
    """
    model = build_model(config, data).to(config.device)
    if is_run(run):
        model.load_state_dict(open_run(run, data)[1].model.state_dict())
    parts = [(data.train.tensor[r], data.train.targets[r]) for r in (own, rows)]
    return Federation(
        model,
        parts,
        build_defence(config),
        lambda parameters: torch.optim.SGD(parameters, config.lr),
        batch_size=max(len(own), len(rows)),
        loss=build_loss(config),
        fuse=False,
        seed=config.seed,
    )


def leaks_of(federation: Federation) -> tuple[dict[str, Leak], Observed]:
    """One round of the federation: the gradients that it leaks, by view, and what the attacker saw.

    V-diff is what the attacker has by right. V-up is the victim's upload, a stress test. For a veil also its upload
    beside the true model, which nobody has: the pair behind the paper's figure. For PPDL also the difference with only
    the numbers that were sent, the choice of an attacker that knows the defence.
    """
    true = copy.deepcopy(federation.model)
    rows = federation.shards.rows(ATTACKER, federation.round) - federation.shards.starts[ATTACKER]
    caught: list[tuple[Round, Any]] = []

    def seen(broadcast: Any, updates: Sequence[Any]) -> None:
        sent = copy.deepcopy(broadcast)
        view = federation.defence.client_view(federation.model, sent)
        caught.append((Round(sent, view, rows.to(federation.device), updates[ATTACKER]), updates[VICTIM]))

    federation.step(seen)
    first, upload = caught[-1]
    after = observe(federation)
    observed = dataclasses.replace(after, rounds=(first, *after.rounds))
    leaks = {"V-diff": from_difference(observed), "V-up": from_upload(first, upload, observed.loss)}
    if observed.defence.startswith("veil"):
        leaks[MISMATCHED] = dataclasses.replace(leaks["V-up"], model=true)
    if observed.defence.startswith("ppdl"):
        leaks["V-diff, masked"] = received(leaks["V-diff"], learning_rate=observed.learning_rate)
    return leaks, observed


def given_labels(leak: Leak, search: Search, size: int, own: Tensor) -> Tensor | None:
    """Labels by rule, for the methods that want them."""
    if search.method == "dlg":
        return None
    found = [single_label(leak)] if size == 1 else batch_labels(leak, size, own)
    return torch.tensor(found, device=own.device)


def box_of(data: Data, like: Tensor) -> tuple[Tensor, Tensor]:
    """Black and white of each channel, as the network gets them."""
    assert data.scale is not None
    mean, deviation = (torch.tensor(part).to(like).view(-1, 1, 1) for part in data.scale)
    return (0 - mean) / deviation, (1 - mean) / deviation


def figures(found: Tensor, true: Tensor) -> dict[str, list[float]]:
    """The metrics of each image."""
    return {"psnr": psnr(found, true), "ssim": ssim(found, true), "mse": mse(found, true)}


def shared_labels(found: Sequence[int], true: Sequence[int]) -> int:
    """How many labels of a batch were found, whatever their order."""
    return sum(min(found.count(label), true.count(label)) for label in set(true))


def floors(data: Data, rows: Tensor, true: Tensor, chance: torch.Generator) -> dict[str, dict[str, list[float]]]:
    """What needs no gradient: the mean image of the data set, and for each image another one of its class."""
    mean = data.pixels(data.train.tensor.mean(0, keepdim=True)).to(true).expand_as(true)
    others = []
    for row in rows.tolist():
        same = (data.train.targets == data.train.targets[row]).nonzero()[:, 0]
        same = same[same != row]
        if not len(same):
            raise BadArgument(
                data.name, f"class {int(data.train.targets[row])} has one record", "a larger --train-size"
            )
        others.append(int(same[torch.randint(len(same), (), generator=chance)]))
    another = data.pixels(data.train.tensor[others]).to(true)
    return {"mean image": figures(mean, true), "another of its class": figures(another, true)}


GRADIENTS = Experiment(
    name="gradients",
    summary="images from gradients (DLG, iDLG, Inverting Gradients)",
    defaults={
        "data": "cifar10",
        "train_size": 1000,
        "clients": 2,
        "model": "lenet",
        "norm": "none",
        "loss": "cross_entropy",
        "optimizer": "sgd",
        "momentum": 0.0,
        "lr": 0.1,
    },
    settings=GradientSettings,
    trains=False,
    shared=lambda config, settings, defences, folder: [],
    attack=attack,
    present=present,
)
