"""The attacks that `fedveil attack` offers."""

from fedveil.studies.attack import Experiment
from fedveil.studies.gradients.run import GRADIENTS
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.membership.run import MEMBERSHIP

ATTACKS: dict[str, Experiment] = {"gradients": GRADIENTS, "inversion": INVERSION, "membership": MEMBERSHIP}
