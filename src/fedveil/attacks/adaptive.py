"""The attackers of each defence, by name: as published, and those that know the defence."""

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
"""What a client can make of what it saw. Plain, PPDL and SPN send a model that needs no cleaning."""

STRONGEST: Mapping[str, str] = {"veil": "calibrated", "dbcl": "stacked"}
ROUNDS: Mapping[str, int] = {"dbcl": 6}
"""Broadcasts that an attacker of the defence collects; one where it is not listed."""


def observations(defence: str, observed: Observed) -> dict[str, Observed]:
    """What every attacker of a defence has to attack."""
    return {PUBLISHED: observed} | {name: attacker(observed) for name, attacker in ADAPTIVE.get(defence, {}).items()}
