"""The settings, the network and the data that server and clients agree on."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.data import load, split
from fedveil.models import mlp

SHAPES = {"bank": (63, 1), "digits": (64, 10)}  # inputs and outputs, so that a client builds the network without data


@dataclass(frozen=True)
class Settings:
    """Settings of a run; each is a flag of job.py."""

    out: str = "runs/flare"
    """the server's folder: checkpoint, metrics, model, report"""
    data: Literal["bank", "digits"] = "bank"
    """digits needs no file"""
    sites: int = 3
    """number of sites that take part: site-1, site-2 ..."""
    defence: Literal["plain", "veil", "ppdl", "dbcl", "spn"] = "veil"
    rounds: int = 50
    lr: float = 0.01
    weight_decay: float = 0.0005
    schedule: Literal["cosine", "constant"] = "cosine"
    layers: int = 3
    hidden: int = 50
    whole_shard: bool = True
    """use all of a client's records in every round instead of its next batch"""
    batch_size: int = 8192
    rounds_per_epoch: int = 1
    """rounds between steps of the learning-rate schedule, and between evaluations"""
    min_answers: int = 2
    """minimum number of valid answers in a round"""
    secure_aggregation: bool = False
    """the server sees only sums; sites need FEDVEIL_IDENTITY and FEDVEIL_ROSTER"""
    timeout: float = 60.0
    """seconds for a round's exchange"""
    seed: int = 0


def make_model(settings: Settings) -> nn.Module:
    """Build the paper's MLP without biases, with the same initial values everywhere."""
    inputs, outputs = SHAPES[settings.data]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return mlp(inputs, outputs, layers=settings.layers, hidden=settings.hidden, bias=False)


def part_of(site: str) -> int:
    """Return the index of a site's part: site-1 has the first."""
    return int(site.rpartition("-")[2]) - 1


def load_part(settings: Settings, site: str) -> tuple[Tensor, Tensor]:
    """Load a site's records: here its part of a shared data set, in the site's FEDVEIL_DATA."""
    data = load(settings.data)
    rows = split(data, settings.sites, seed=settings.seed)[part_of(site)]
    return data.train.inputs[rows], data.train.targets[rows]
