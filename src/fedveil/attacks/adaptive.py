"""The attackers of each defence, by name: as published, and adaptive ones, which know the defence."""

from collections.abc import Callable, Mapping

from fedveil.attacks.dbcl import stacked
from fedveil.attacks.observed import Observed
from fedveil.attacks.veil import calibrated, centred, standardised

Attacker = Callable[[Observed], Observed]
PUBLISHED = "as published"

ADAPTIVE: Mapping[str, Mapping[str, Attacker]] = {
    "veil": {"centred": centred, "calibrated": calibrated, "standardised": standardised},
    "dbcl": {"stacked": stacked},
}
"""How an adaptive client improves the model it received. Plain, PPDL and SPN send the model itself."""

STRONGEST: Mapping[str, str] = {"veil": "calibrated", "dbcl": "stacked"}
ROUNDS: Mapping[str, int] = {"dbcl": 6}
"""How many broadcasts an attacker collects; 1 for defences not listed."""


def observations(defence: str, observed: Observed) -> dict[str, Observed]:
    """What each attacker of a defence attacks, by the attacker's name."""
    return {PUBLISHED: observed} | {name: attacker(observed) for name, attacker in ADAPTIVE.get(defence, {}).items()}
