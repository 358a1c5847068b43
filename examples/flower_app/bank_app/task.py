"""The network and the data that the server and clients agree on."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedveil.flower import cache_records
from fedveil.models import mlp

# numbers of inputs and outputs, so that a client can build the network without data
SHAPES = {"bank": (63, 1), "digits": (64, 10)}


def make_model(config: Any) -> nn.Module:
    """Build the paper's MLP without biases, with the same initial values everywhere."""
    inputs, outputs = SHAPES[str(config["data"])]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config["seed"]))
        return mlp(inputs, outputs, layers=int(config["layers"]), hidden=int(config["hidden"]), bias=False)


def load_part(context: Context) -> tuple[Tensor, Tensor]:
    """Load the records of this node.

    The node's config specifies them: path="..." is its data, partition-id=0 num-partitions=3 selects part of a
    shared file, and cache="..." is a folder for loaded records.
    """
    node, config = context.node_config, context.run_config
    path, name = str(node.get("path", config["path"])), str(config["data"])
    part, parts = int(node.get("partition-id", 0)), int(node.get("num-partitions", 1))

    def make() -> tuple[Tensor, Tensor]:
        from fedveil.data import load, split

        data = load(name, path=Path(path) if path else None)
        rows = split(data, parts, seed=int(config["seed"]))[part]
        return data.train.inputs[rows], data.train.targets[rows]

    home = Path(str(node.get("cache", "~/.cache/fedveil/flower"))).expanduser()
    source = hashlib.sha256(path.encode()).hexdigest()[:8]
    return cache_records(home / f"{name}-{source}-{part}-of-{parts}-seed-{config['seed']}.safetensors", make)
