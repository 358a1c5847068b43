"""Records of a membership attack, and the shadow federations that the attacker trains on some of them."""

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
from fedveil.attacks.registry import find_attackers
from fedveil.attacks.scores import Scores
from fedveil.data import Data, Part, split
from fedveil.defences.registry import find
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, predict
from fedveil.files import write_whole
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.config import Config
from fedveil.studies.federations import round_progress
from fedveil.studies.jobs import Done, Job, Result
from fedveil.studies.observation import observe

Indices = NDArray[np.int64]
KINDS = ("", "cleaned", "inside")  # of a shadow's files


@dataclass(frozen=True, eq=False)
class Records:
    """Members and non-members in one pool, and the indices of each part of it.

    Attributes:
        pool: all of them.
        own, known: the attacker's records, and the non-members that it knows.
        victims, fresh: the test: records of other clients, and as many non-members.
    """

    pool: Part
    own: Indices
    known: Indices
    victims: Indices
    fresh: Indices

    @property
    def parts(self) -> tuple[Indices, Indices, Indices, Indices]:
        """All parts, in the order of `Sizes`."""
        return self.own, self.known, self.victims, self.fresh


def divide_records(config: Config, data: Data, *, everyone: bool = False) -> Records:
    """Divide members and at most as many non-members, half of which the attacker knows.

    A held-out record that equals a member is left out. With `everyone`, all non-members are used, the attacker knows a
    fifth of them, and the test is not balanced: for rates that need many non-members.
    """
    asked, seed, count = config.data, config.training.seed, len(data.train.targets)
    shares = split(data, asked.clients, how=asked.split, seed=seed, alpha=asked.alpha, column=asked.column)
    if len(shares) < 2:
        raise BadArgument("membership", "there is no other client to learn about", "use --clients 2 or more")
    own, *others = (rows.numpy() for rows in shares)  # the attacker is client 0
    members, chance = set(digests(data.train.tensor)), generator("non-members", seed)
    new = [index for index, digest in enumerate(digests(data.test.tensor)) if digest not in members]
    order = torch.randperm(len(new), generator=chance)[: None if everyone else count]
    outside = data.test.take([new[index] for index in order.tolist()])
    pool = Part(torch.cat([data.train.tensor, outside.tensor]), torch.cat([data.train.targets, outside.targets]))
    known, fresh = np.split(count + np.arange(len(order)), [len(order) // (5 if everyone else 2)])
    victims = np.concatenate(others)
    victims = victims[torch.randperm(len(victims), generator=chance).numpy()]
    test = None if everyone else min(len(victims), len(fresh))
    return Records(pool, own, known, victims[:test], fresh[:test])


def digests(inputs: Tensor) -> list[bytes]:
    """Return one digest per record."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]


def shadow_defence(defence: str) -> str:
    """Return the defence of the shadows: a veiled federation trains the same model as a plain one."""
    return find_attackers(find(defence)).shadows or defence


def shadow_file(folder: Path, defence: str, number: int, kind: str = "") -> Path:
    """Return the file of a shadow's outputs as its clients see them.

    Kind "cleaned": as the server sees them, for attackers that remove the noise; "inside": its training records.
    """
    name = f"{shadow_defence(defence).replace(':', '.')}-{number}"
    return folder / "shadows" / f"{name}{'-' if kind else ''}{kind}.npy"


def shadow_members(config: Config, records: int, shadows: int, size: int | None = None) -> NDArray[np.bool_]:
    """Return which records of the pool each shadow trains on."""
    return halves(records, shadows, generator("shadows", config.training.seed, shadows), size)


def read_shadows(config: Config, count: int, folder: Path, cleaned: bool) -> tuple[Scores, NDArray[np.bool_]]:
    """Return the outputs of all shadows on the pool, and which records each trained on."""

    def stack(kind: str) -> Scores:
        files = [shadow_file(folder, config.defence.name, number, kind) for number in range(count)]
        return np.stack([np.load(file) for file in files]).astype(np.float64)

    return stack("cleaned" if cleaned else ""), stack("inside") > 0


@dataclass(frozen=True)
class Shadow(Result):
    """A federation that the attacker trained: the metrics of its model on its training records and on others."""

    seed: int
    inside: dict[str, float]
    outside: dict[str, float]


@dataclass(frozen=True)
class TrainShadow:
    """Train a federation like the attacked one on half of the pool, and write its outputs on the whole pool.

    One file has them as its clients see them, another as the server does (`shadow_file`). The pool is that of
    `divide_records`, with the same `everyone` as for the attack. If `matched`, it trains on as many records as the
    attacked federation, if half of the pool has as many.
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
        pool = divide_records(config, data, everyone=self.everyone).pool
        size = len(data.train.targets) if self.matched else None
        inside = shadow_members(config, len(pool.targets), self.shadows, size)[self.number]
        how = "iid" if config.data.split == "column" else config.data.split
        own = config.changed(seed=config.training.seed + 1 + self.number, split=how, column=None)
        federation = build_federation(own, Data(data.name, pool.take(inside), data.test, classes=data.classes))
        federation.fit(own.training.epochs, on_round=round_progress(own.training.epochs, progress))
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
    """Return all shadows of all defences, none for targets without classes; refuse odd numbers."""
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
