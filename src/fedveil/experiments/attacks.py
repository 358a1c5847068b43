"""The attacks that `fedveil attack` offers."""

from fedveil.experiments.attack import Experiment
from fedveil.experiments.gradients import GRADIENTS
from fedveil.experiments.inversion import INVERSION
from fedveil.experiments.membership import MEMBERSHIP

ATTACKS: dict[str, Experiment] = {"gradients": GRADIENTS, "inversion": INVERSION, "membership": MEMBERSHIP}
