"""The settings, the network and the data that the server and clients agree on."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.data import load, split
from fedveil.models import mlp

# numbers of inputs and outputs, so that a client can build the network without data
SHAPES = {"bank": (63, 1), "digits": (64, 10)}


@dataclass(frozen=True)
class Settings:
    """Settings of a run, each of which is a flag of job.py."""

    out: str = "runs/flare"
    """the server's folder for checkpoints, metrics, models and the report"""
    data: Literal["bank", "digits"] = "bank"
    """data set; digits needs no file"""
    sites: int = 3
    """number of sites, which are named site-1, site-2 and so on"""
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
    """timeout of a round's exchange in seconds"""
    seed: int = 0


def make_model(settings: Settings) -> nn.Module:
    """Build the paper's MLP without biases, with the same initial values everywhere."""
    inputs, outputs = SHAPES[settings.data]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return mlp(inputs, outputs, layers=settings.layers, hidden=settings.hidden, bias=False)


def part_of(site: str) -> int:
    """Return the index of a site's part; site-1 has the first part."""
    return int(site.rpartition("-")[2]) - 1


def load_part(settings: Settings, site: str) -> tuple[Tensor, Tensor]:
    """Load a site's records, which are a part of a shared data set in the site's FEDVEIL_DATA."""
    data = load(settings.data)
    rows = split(data, settings.sites, seed=settings.seed)[part_of(site)]
    return data.train.inputs[rows], data.train.targets[rows]
