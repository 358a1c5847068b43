"""The smallest model of each family of timm; a family's models share the letters that their names begin with.

A model with more than 60 million parameters is built with fewer blocks, where its constructor takes their number.
"""

import math
import re
from itertools import groupby

import torch

from benchmarks.zoo_measure import CLASSES, Case, declare_torchvision, images
from benchmarks.zoo_measure import measure as measure_case

PARAMETERS = 60e6
SHORTER: tuple[dict[str, object], ...] = ({"depth": 2}, {"layers": (1, 1, 1, 1)})


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


def count(name: str, **given: object) -> float:
    """Return a model's number of parameters, or infinity if it cannot be built without values."""
    import timm

    try:
        with torch.device("meta"):
            return sum(own.numel() for own in timm.create_model(name, **given).parameters())
    except Exception:  # it computes with values while it is built, or takes no such argument
        return math.inf


def smallest(models: list[str]) -> tuple[str, dict[str, object]]:
    """Return the name of the model with the fewest parameters, and settings that shorten it if it is large."""
    name = min(models, key=lambda own: (count(own), len(own)))
    if PARAMETERS < count(name) < math.inf:
        return name, next((given for given in SHORTER if count(name, **given) <= PARAMETERS), {})
    return name, {}


def build(name: str, settings: dict[str, object]) -> Case:
    """Build a model for 64 pixels, or as few as it allows, and a batch."""
    import timm

    for size in (64, 128, 192):
        for given in ({}, {"img_size": size}):  # most convolutional networks have no such argument
            try:
                model = timm.create_model(name, num_classes=CLASSES, **settings, **given)
                with torch.no_grad():
                    model.train()(images(size).float())
            except (TypeError, ValueError, AssertionError, RuntimeError):
                continue
            return model, images(size)
    model = timm.create_model(name, num_classes=CLASSES, **settings)
    return model, images(model.default_cfg["input_size"][-1])


def measure(name: str) -> dict[str, object]:
    """Compare the gradients of a family's smallest model with those of autograd."""
    model, settings = smallest(families()[name])
    note = " ".join([model, *[f"with {key}={value}" for key, value in settings.items()]])
    return measure_case(lambda: build(model, settings), note)
