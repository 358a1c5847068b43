"""The smallest model of each family of timm; a family's models share the letters that their names begin with.

A family without a model of at most 60 million parameters is not built.
"""

import re
from itertools import groupby

import torch

from benchmarks.zoo_measure import CLASSES, Case, declare_torchvision, images
from benchmarks.zoo_measure import measure as measure_case

PARAMETERS = 60e6


def families() -> dict[str, list[str]]:
    """Return the models of each family; "test" is none."""
    declare_torchvision()
    import timm

    def family(name: str) -> str:
        return re.match("[a-z]+", name)[0]  # type: ignore[index]

    found = {key: list(group) for key, group in groupby(sorted(timm.list_models(), key=family), key=family)}
    return {key: own for key, own in found.items() if key != "test"}


def names() -> list[str]:
    """Return the names of the families."""
    return sorted(families())


def smallest(models: list[str]) -> tuple[str, int]:
    """Return the name of the model with the fewest parameters, and their number."""
    import timm

    counts: dict[str, int] = {}
    for name in models:
        try:
            with torch.device("meta"):
                counts[name] = sum(own.numel() for own in timm.create_model(name).parameters())
        except Exception:  # it computes with values while it is built
            continue
    name = min(counts, key=counts.__getitem__) if counts else min(models, key=len)
    return name, counts.get(name, 0)


def build(name: str) -> Case:
    """Build a model for 64 pixels, or as few as it allows, and a batch."""
    import timm

    for size in (64, 128, 192):
        for given in ({}, {"img_size": size}):  # most convolutional networks have no such argument
            try:
                model = timm.create_model(name, num_classes=CLASSES, **given)
                with torch.no_grad():
                    model.train()(images(size).float())
            except (TypeError, ValueError, AssertionError, RuntimeError):
                continue
            return model, images(size)
    model = timm.create_model(name, num_classes=CLASSES)
    return model, images(model.default_cfg["input_size"][-1])


def measure(name: str) -> dict[str, object]:
    """Compare the gradients of a family's smallest model with those of autograd."""
    model, count = smallest(families()[name])
    if count > PARAMETERS:
        return {"result": "not built", "reason": f"{model} has {count / 1e6:.0f} million parameters"}
    return measure_case(lambda: build(model), model)
