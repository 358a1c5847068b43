"""NVIDIA FLARE's filters, which clients apply to their updates with FLARE's own code.

Import this module only if nvflare is installed (`pip install 'fedveil[nvflare]'`).
"""

import math

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from fedveil.checks import check_fraction, check_positive, check_range
from fedveil.defences.filtered import Arrays, Filter, Filtered, fresh_numpy_noise
from fedveil.errors import BadArgument


class FlarePercentile(Filtered):
    """Clients share only their largest changes, truncated to +-gamma (FLARE's `PercentilePrivacy`).

    FLARE sends an update unfiltered if a setting is out of range; here, such settings are refused.

    Args:
        percentile: elements whose magnitude is below this percentile become 0.
        gamma: maximum magnitude of an element.
    """

    name = "nvflare:PercentilePrivacy"
    remote_settings = ("percentile", "gamma")

    def __init__(self, percentile: float = 10.0, gamma: float = 0.01) -> None:
        self.percentile = check_range(self.name, "percentile", percentile, 0, 100, "use percentile=10")
        self.gamma = check_positive(self.name, "gamma", gamma, "use gamma=0.01")

    def create_filter(self) -> Filter:
        """Return FLARE's filter."""
        return flare_filter(PercentilePrivacy(self.percentile, self.gamma))


class FlareSVT(Filtered):
    """Clients share a random selection of elements with Laplace noise (FLARE's `SVTPrivacy`).

    FLARE's accounting assumes that one element changes by at most 2 gamma. A record changes all elements, so this
    accounting does not bound the privacy loss of a record. A server cannot choose the settings of clients on a network.

    Args:
        fraction: fraction of the elements to share.
        epsilon: budget of the selection.
        noise_var: budget of each shared element; the noise has scale 2 gamma / noise_var.
        gamma: maximum magnitude of an element before noise is added.
        tau: threshold of the selection; at most gamma, since the selection might otherwise never end.
    """

    name = "nvflare:SVTPrivacy"
    refuses_buffers = True

    def __init__(
        self,
        fraction: float = 0.1,
        epsilon: float = 0.1,
        noise_var: float = 0.1,
        gamma: float = 1e-5,
        tau: float = 1e-6,
    ) -> None:
        self.fraction = check_fraction(self.name, "fraction", fraction, "use fraction=0.1")
        self.epsilon = check_positive(self.name, "epsilon", epsilon, "use epsilon=0.1")
        self.noise_var = check_positive(self.name, "noise_var", noise_var, "use noise_var=0.1")
        self.gamma = check_positive(self.name, "gamma", gamma, "use gamma=1e-5")
        self.tau = check_range(self.name, "tau", tau, 0, self.gamma, "use a tau of at most gamma")

    def create_filter(self) -> Filter:
        """Return FLARE's filter."""
        return flare_filter(SVTPrivacy(self.fraction, self.epsilon, self.noise_var, self.gamma, self.tau))

    def claimed_epsilon(self, elements: int) -> float:
        """Return the epsilon that FLARE's accountant adds for one update of `elements` elements."""
        return self.epsilon + self.noise_var * math.ceil(elements * self.fraction)


def flare_filter(component: DXOFilter) -> Filter:
    """Return a function that calls a filter as FLARE does, on the weight difference in a client's reply."""

    def apply(arrays: Arrays) -> Arrays:
        reply: Shareable = DXO(DataKind.WEIGHT_DIFF, data=arrays).to_shareable()
        reply.set_return_code(ReturnCode.OK)
        with fresh_numpy_noise():
            result = from_shareable(component.process(reply, FLContext()))
        if type(component).__name__ not in result.get_filter_history():
            raise BadArgument(
                type(component).__name__, "FLARE did not apply the filter", "use the supported nvflare version"
            )
        filtered_arrays: Arrays = result.data
        return filtered_arrays

    return apply
