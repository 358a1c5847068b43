"""The attacks that `fedveil attack` offers."""

from fedveil.experiments.attack import Experiment
from fedveil.experiments.inversion import INVERSION
from fedveil.experiments.membership import MEMBERSHIP

ATTACKS: dict[str, Experiment] = {"inversion": INVERSION, "membership": MEMBERSHIP}
