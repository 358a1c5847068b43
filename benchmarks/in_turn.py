"""Plain and veiled rounds in turn on one engine, so that both see one machine; networks and records of the cases."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.data import load, split
from fedveil.defences import Plain, Veil
from fedveil.federation.remote import RemoteServer
from fedveil.models import mlp, resnet

CLIENTS = 3
BATCHES = {"mlp": 8192, "mlp-512": 512, "mlp-8.7k": 8192, "mlp-228k": 8192}  # 64 for others
WIDTHS = {"mlp-8.7k": 50, "mlp-228k": 320}  # digits


def make_model(net: str) -> nn.Module:
    """MLP 63-50-50-50-1 as for bank ("mlp", "mlp-512"), 64-n-n-n-10 as for digits, or ResNet20 for CIFAR-10."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if net in WIDTHS:
            return mlp(64, 10, layers=3, hidden=WIDTHS[net], bias=False)
        return mlp(63, 1, bias=False) if net.startswith("mlp") else resnet(20, 3, 10)


def records(net: str, part: int) -> tuple[Tensor, Tensor]:
    """A client's: 6,590 rows, a fifth of bank's; a third of digits; 256 images, or 32 for "resnet20-32"."""
    if net in WIDTHS:
        data = load("digits")
        rows = split(data, CLIENTS, seed=0)[part]
        return data.train.inputs[rows], data.train.targets[rows]
    chance = torch.Generator().manual_seed(part)
    if net.startswith("mlp"):
        return torch.randn(6590, 63, generator=chance), torch.rand(6590, 1, generator=chance)
    images = 32 if net.endswith("-32") else 256
    return torch.randn(images, 3, 32, 32, generator=chance), torch.randint(0, 10, (images,), generator=chance)


def options(net: str) -> dict[str, Any]:
    """How clients go through their records."""
    return {"batch_size": BATCHES.get(net, 64), "whole_shard": net != "mlp-512"}


def rounds_in_turn(make_server: Callable[..., RemoteServer], config: Mapping[str, Any]) -> None:
    """Write seconds and bytes of each round; the first ones, in which data is prepared and workers start, are left out.

    Args:
        make_server: takes what every `RemoteServer` takes behind its engine.
        config: net, loss, pairs of rounds, and out, the folder in which done.json is written.
    """
    net = str(config["net"])
    servers = {
        name: make_server(
            make_model(net),
            records(net, 0)[0][:2],
            defence,
            torch.optim.Adam,
            loss=str(config["loss"]),
            wait_for=CLIENTS,
            **options(net),
        )
        for name, defence in {"plain": Plain(), "veil": Veil()}.items()
    }
    found: list[dict[str, Any]] = []
    for _ in range(int(config["pairs"]) + 1):
        pair = {}
        for name, server in servers.items():
            began = time.perf_counter()
            figures = server.step().figures
            names = {"answers": "answers", "down": "bytes_down", "up": "bytes_up", "work": "seconds_work"}
            pair[name] = {"seconds": time.perf_counter() - began} | {key: figures[of] for key, of in names.items()}
        found.append(pair)
    (Path(str(config["out"])) / "done.json").write_text(json.dumps(found[1:]))
