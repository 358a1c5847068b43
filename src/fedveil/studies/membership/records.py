"""Records of a membership attack, and the federations that the attacker trains itself on some of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.attacks.membership import halves
from fedveil.attacks.scores import Scores
from fedveil.data import Data, Part, split
from fedveil.defences.registry import find
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.shards import generator
from fedveil.files import write_whole
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.config import Config
from fedveil.studies.jobs import Done, Job, Progress, Result
from fedveil.studies.victim import observe, on_round

Places = NDArray[np.int64]
KINDS = ("", "cleaned", "inside")  # of a shadow's files


@dataclass(frozen=True, eq=False)
class Records:
    """Members and non-members in one pool, and the places of each part of it.

    Attributes:
        pool: all of them.
        own, known: the attacker's records, and the non-members that it knows.
        victims, fresh: the test: others' records and non-members, as many of each.
    """

    pool: Part
    own: Places
    known: Places
    victims: Places
    fresh: Places

    @property
    def parts(self) -> tuple[Places, Places, Places, Places]:
        """Without the pool, in the order of `Sizes`."""
        return self.own, self.known, self.victims, self.fresh


def records_of(config: Config, data: Data, *, everyone: bool = False) -> Records:
    """Divide members and non-members, of which there are at most as many; half of them the attacker knows.

    A held-out record that equals a member is no non-member, and left out. With `everyone` all non-members are there,
    the attacker knows a fifth of them, and the test is not cut to as many of each: for rates that need many of them.
    """
    asked, seed, count = config.data, config.training.seed, len(data.train.targets)
    shares = split(data, asked.clients, how=asked.split, seed=seed, alpha=asked.alpha, column=asked.column)
    if len(shares) < 2:
        raise BadArgument("membership", "there is nobody else to learn about", "--clients 2 or more")
    own, *others = (rows.numpy() for rows in shares)  # the attacker is client 0
    members, chance = set(digests(data.train.tensor)), generator("non-members", seed)
    new = [place for place, digest in enumerate(digests(data.test.tensor)) if digest not in members]
    order = torch.randperm(len(new), generator=chance)[: None if everyone else count]
    outside = data.test.take([new[place] for place in order.tolist()])
    pool = Part(torch.cat([data.train.tensor, outside.tensor]), torch.cat([data.train.targets, outside.targets]))
    known, fresh = np.split(count + np.arange(len(order)), [len(order) // (5 if everyone else 2)])
    victims = np.concatenate(others)
    victims = victims[torch.randperm(len(victims), generator=chance).numpy()]
    test = None if everyone else min(len(victims), len(fresh))
    return Records(pool, own, known, victims[:test], fresh[:test])


def digests(inputs: Tensor) -> list[bytes]:
    """One fingerprint per record."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]


def shadow_defence(defence: str) -> str:
    """A veiled federation trains the plain one's model, so that both have the same shadows."""
    return find(defence).shadows or defence


def shadow_file(folder: Path, defence: str, number: int, kind: str = "") -> Path:
    """Where a shadow's outputs are, as its clients see them.

    Of kind "cleaned", for attackers that undo the defence, the server's; of kind "inside", which records it trained on.
    """
    name = f"{shadow_defence(defence).replace(':', '.')}-{number}"
    return folder / "shadows" / f"{name}{'-' if kind else ''}{kind}.npy"


def inside_of(config: Config, records: int, shadows: int, size: int | None = None) -> NDArray[np.bool_]:
    """Which record of the pool each shadow trains on."""
    return halves(records, shadows, generator("shadows", config.training.seed, shadows), size)


def read_shadows(config: Config, count: int, folder: Path, cleaned: bool) -> tuple[Scores, NDArray[np.bool_]]:
    """The outputs of all shadows on all of the pool, and which records each trained on."""

    def read(kind: str) -> Scores:
        files = [shadow_file(folder, config.defence.name, number, kind) for number in range(count)]
        return np.stack([np.load(file) for file in files]).astype(np.float64)

    return read("cleaned" if cleaned else ""), read("inside") > 0


@dataclass(frozen=True)
class Shadow(Result):
    """A federation that the attacker trained itself: the metrics of its model on records inside and outside of it."""

    seed: int
    inside: dict[str, float]
    outside: dict[str, float]


@dataclass(frozen=True)
class TrainShadow:
    """Train a federation like the attacked one on half of the pool, and keep its outputs on all of the pool.

    As its clients see them in one file, the server's in another (`shadow_file`). The pool is that of `records_of`, with
    the same `everyone` as for the attack. If `matched`, it trains on as many records as the attacked federation did, if
    half of the pool has as many.
    """

    config: Config
    number: int
    shadows: int
    folder: Path
    everyone: bool = False
    matched: bool = False

    def __call__(self, progress: Progress, done: Done) -> Shadow:
        """Train, and write the outputs; those of an earlier training are removed first."""
        config, data = self.config, load_data(self.config)
        for kind in KINDS:
            shadow_file(self.folder, config.defence.name, self.number, kind).unlink(missing_ok=True)
        pool = records_of(config, data, everyone=self.everyone).pool
        size = len(data.train.targets) if self.matched else None
        inside = inside_of(config, len(pool.targets), self.shadows, size)[self.number]
        how = "iid" if config.data.split == "column" else config.data.split
        own = config.changed(seed=config.training.seed + 1 + self.number, split=how, column=None)
        federation = build_federation(own, Data(data.name, pool.take(inside), data.test, classes=data.classes))
        federation.fit(own.training.epochs, on_round=on_round(own.training.epochs, progress))
        views = observe(federation).model, federation.model
        outputs = [predict(view, pool.tensor.to(federation.device)).cpu() for view in views]
        for kind, values in zip(KINDS, (outputs[0].numpy(), outputs[1].numpy(), inside), strict=True):
            path = shadow_file(self.folder, config.defence.name, self.number, kind)
            write_whole(path, partial(np.save, arr=values))
        parts = [torch.from_numpy(rows) for rows in (inside, ~inside)]
        return Shadow(own.training.seed, *(metrics(outputs[1][rows], pool.targets[rows]) for rows in parts))


def shadow_jobs(
    config: Config,
    defences: Sequence[str],
    count: int,
    folder: Path,
    *,
    label: str = "",
    everyone: bool = False,
    matched: bool = False,
) -> list[Job[Result]]:
    """All shadows of all defences; none without classes, which attacks by shadows need. Refuses odd numbers."""
    if not count or config.data.clients < 2:
        return []
    halves(2, count, torch.Generator())
    if load_data(config).train.targets.dim() != 1:
        return []
    return [
        Job(
            f"{label}shadow-{kind.replace(':', '.')}-{number}",
            TrainShadow(config.changed(defence=kind), number, count, folder, everyone, matched),
            Shadow,
        )
        for kind in dict.fromkeys(map(shadow_defence, defences))
        for number in range(count)
    ]
