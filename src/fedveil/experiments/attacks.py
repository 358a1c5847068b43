"""The attacks that `fedveil attack` offers."""

from fedveil.experiments.attack import Experiment

ATTACKS: dict[str, Experiment] = {}
