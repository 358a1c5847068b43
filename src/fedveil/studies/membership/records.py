"""Records of a membership attack, and the federations that the attacker trains itself on some of them."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.attacks.membership import halves
from fedveil.data import Data, split
from fedveil.data.records import Part
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.shards import generator
from fedveil.runs.config import Config, load_data
from fedveil.runs.folder import federation_of
from fedveil.studies.jobs import Result, Tell
from fedveil.studies.victim import ATTACKER, observe, shown

Places = NDArray[np.int64]


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


def records_of(config: Config, data: Data, *, everyone: bool = False) -> Records:
    """Divide members and non-members, of which there are at most as many; half of them the attacker knows.

    A held-out record that equals a member is no non-member, and left out. With `everyone` all non-members are there,
    the attacker knows a fifth of them, and the test is not cut to as many of each: for rates that need many of them.
    """
    rows = [part.numpy() for part in shares(config, data)]
    if len(rows) < 2:
        raise BadArgument("membership", "there is nobody else to learn about", "--clients 2 or more")
    members = set(digests(data.train.tensor))
    new = [place for place, digest in enumerate(digests(data.test.tensor)) if digest not in members]
    chance = generator("non-members", config.seed)
    count = len(data.train.targets)
    most = len(new) if everyone else count
    new = [new[place] for place in torch.randperm(len(new), generator=chance)[:most].tolist()]
    fresh_part = data.test.take(new)
    inputs = torch.cat([data.train.tensor, fresh_part.tensor])
    pool = Part(inputs, torch.cat([data.train.targets, fresh_part.targets]))
    known, fresh = np.split(count + np.arange(len(new)), [len(new) // (5 if everyone else 2)])
    victims = np.concatenate([part for client, part in enumerate(rows) if client != ATTACKER])
    victims = victims[torch.randperm(len(victims), generator=chance).numpy()]
    test = min(len(victims), len(fresh))
    if everyone:
        return Records(pool, rows[ATTACKER], known, victims, fresh)
    return Records(pool, rows[ATTACKER], known, victims[:test], fresh[:test])


def shares(config: Config, data: Data) -> list[Tensor]:
    """Each client's rows of the training records, as the federation divides them."""
    return split(data, config.clients, how=config.split, seed=config.seed, alpha=config.alpha, column=config.column)


def digests(inputs: Tensor) -> list[bytes]:
    """A fingerprint a record."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]


def shadow_defence(defence: str) -> str:
    """A veiled federation trains the plain one's model, so that both have the same shadows."""
    return "plain" if defence == "veil" else defence


def shadow_file(folder: Path, defence: str, number: int, cleaned: bool = False) -> Path:
    """Where a shadow's outputs are: as its clients see them, or, for attackers that undo the defence, the server's."""
    return folder / "shadows" / f"{shadow_defence(defence)}-{number}{'-cleaned' if cleaned else ''}.npy"


def inside_of(config: Config, records: int, shadows: int) -> NDArray[np.bool_]:
    """Which record of the pool each shadow trains on."""
    return halves(records, shadows, generator("shadows", config.seed, shadows))


def train_shadow(tell: Tell, config: Config, number: int, shadows: int, files: Sequence[Path]) -> Result:
    """A federation like the attacked one on half of the pool; its outputs on all of the pool.

    As a client sees them in the first file, the server's in the second.
    """
    data = load_data(config)
    pool = records_of(config, data).pool
    inside = inside_of(config, len(pool.targets), shadows)[number]
    own = Data(data.name, pool.take(inside), data.test, classes=data.classes)
    how = "iid" if config.split == "column" else config.split
    config = dataclasses.replace(config, seed=config.seed + 1 + number, split=how, column=None)
    federation = federation_of(config, own)
    federation.fit(config.epochs, on_round=shown(config.epochs, tell))
    outputs = predict(observe(federation).model, pool.tensor.to(federation.device)).cpu()
    true = predict(federation.model, pool.tensor.to(federation.device)).cpu()
    for file, values in zip(files, (outputs, true), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, values.numpy())
    parts = {"inside": torch.from_numpy(inside), "outside": torch.from_numpy(~inside)}
    found = {name: metrics(true[rows], pool.targets[rows]) for name, rows in parts.items()}
    return {"seed": config.seed, **{f"{part} {name}": v for part, m in found.items() for name, v in m.items()}}
