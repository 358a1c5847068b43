"""The attacks of `fedveil attack` by name. No torch is needed for it."""

from typing import TYPE_CHECKING, Any

from fedveil.checks import one_of
from fedveil.errors import BadArgument
from fedveil.lookup import imported, installed

if TYPE_CHECKING:
    from fedveil.studies.attack import MultiDefenceStudy

AUDIT = "fedveil.studies.audit.run:AUDIT"
GROUP = "fedveil.attacks"
ATTACKS = {
    "gradients": ("fedveil.studies.gradients.run:GRADIENTS", "images from gradients (DLG, iDLG, Inverting Gradients)"),
    "inversion": (
        "fedveil.studies.inversion.run:INVERSION",
        "what the classes that a federation trains on look like, by a generator of public images (GMI)",
    ),
    "membership": ("fedveil.studies.membership.run:MEMBERSHIP", "which records the other clients trained on"),
    "poisoning": (
        "fedveil.studies.poisoning.run:POISONING",
        "what hostile clients do to the model, with and without limits on them",
    ),
    "server": (
        "fedveil.studies.gradients.server:SERVER",
        "what a curious server learns from updates, from sums (secure aggregation) and from their differences",
    ),
}
"""The module and summary of each attack."""


def attack_names() -> dict[str, str]:
    """Return the attacks of this library and of installed packages, each with a summary."""
    theirs = {name: f"{spec}, from an installed package" for name, spec in installed(GROUP).items()}
    return theirs | {name: summary for name, (_, summary) in ATTACKS.items()}


def find_attack(name: str) -> "MultiDefenceStudy[Any, Any]":
    """Return an attack by its name, that of an entry point, or `package.module:NAME`."""
    from fedveil.studies.attack import MultiDefenceStudy

    spec = name
    if ":" not in name:
        one_of("fedveil attack", "attack", name, attack_names())
        spec = ATTACKS[name][0] if name in ATTACKS else installed(GROUP)[name]
    found = imported(spec, "an attack", "my_package.attacks:GUESS")
    if isinstance(found, type) and issubclass(found, MultiDefenceStudy):
        found = found()
    if not isinstance(found, MultiDefenceStudy):
        fix = "name an instance or a subclass of fedveil.studies.attack.AttackStudy"
        raise BadArgument(spec, f"is {type(found).__name__}, not an attack", fix)
    return found
