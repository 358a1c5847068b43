"""The attacks that `fedveil attack` offers."""

from fedveil.experiments.attack import Experiment
from fedveil.experiments.inversion import INVERSION

ATTACKS: dict[str, Experiment] = {"inversion": INVERSION}
