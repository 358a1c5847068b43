"""The attackers for each defence.

This module lists the attackers for the built-in defences. A defence from another package declares its attackers in its
record, `Record(..., attackers="my_package.attacks:ATTACKERS")`, where `ATTACKERS` is an instance of `Attackers`.
Without such a declaration, the generic attackers are used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from fedveil.attacks import dbcl, generic, likely_outputs, veil
from fedveil.attacks.canonical_gradient import from_canonical_difference
from fedveil.attacks.first_layer import (
    rebuild_delayed_record,
    rebuild_filtered_record,
    rebuild_selected_record,
    rebuild_veiled_record,
)
from fedveil.attacks.leaked_gradients import Leak, from_masked_difference
from fedveil.attacks.observation import PUBLISHED, Observation, attempt
from fedveil.defences.registry import INCLUDED, Record
from fedveil.errors import BadArgument
from fedveil.lookup import import_object

ModelAttacker = Callable[[Observation], Observation]  # returns the observation with a better estimate of the model
EXAMPLE = "my_package.attacks:ATTACKERS"
GENERIC_ROUNDS = 6
GENERIC_ATTACKERS: Mapping[str, ModelAttacker] = {
    "broadcasts averaged": generic.average_broadcasts,
    "outputs calibrated": generic.calibrate_outputs,
}


@dataclass(frozen=True)
class Attackers:
    """The attackers for one defence. Each mapping has labels as keys and attackers as values.

    Attributes:
        models: adaptive attackers, which estimate the true model better than the broadcast does.
        rounds: number of broadcasts that the adaptive attackers need.
        strongest: labels of the strongest adaptive attackers; slow attacks run only these.
        generic: attackers that estimate the model without knowing the defence.
        rebuilders: attackers that rebuild a record from broadcasts.
        rebuild_rounds: number of broadcasts that the rebuilders need.
        leaks: attackers that derive a victim's gradient.
        shadows: name of the defence used to train shadow models; None for this defence.
    """

    models: Mapping[str, ModelAttacker] = field(default_factory=dict)
    rounds: int = 1
    strongest: tuple[str, ...] = ()
    generic: Mapping[str, ModelAttacker] = field(default_factory=lambda: GENERIC_ATTACKERS)
    rebuilders: Mapping[str, Callable[[Observation], Tensor]] = field(default_factory=dict)
    rebuild_rounds: int = 2
    leaks: Mapping[str, Callable[[Observation], Leak]] = field(default_factory=dict)
    shadows: str | None = None

    @property
    def broadcasts_needed(self) -> int:
        """The number of broadcasts that the adaptive and generic attackers need."""
        return max(self.rounds, GENERIC_ROUNDS) if self.generic else self.rounds

    def modules(self) -> set[str]:
        """Return the names of the modules that define these attackers."""
        attackers = [*self.models.values(), *self.generic.values(), *self.rebuilders.values(), *self.leaks.values()]
        return {getattr(attacker, "func", attacker).__module__ for attacker in attackers}


STACKED_ATTACKERS = Attackers(generic={}, rebuilders={"rounds stacked": rebuild_filtered_record}, rebuild_rounds=6)
"""The attackers for defences whose clients receive the true model, and send incomplete or noisy updates."""
MASKED_LEAKS = {"V-diff, masked": from_masked_difference}
ATTACKERS: Mapping[str, Attackers] = {
    "plain": Attackers(generic={}),
    "veil": Attackers(
        models={
            "offset removed": veil.remove_offset,
            "one broadcast, no data": likely_outputs.fit_fake_inputs,
            "own inputs, no labels": likely_outputs.fit_own_inputs,
            "two broadcasts, no data": partial(veil.remove_noise, broadcasts=2),
            "six broadcasts, no data": partial(veil.remove_noise, broadcasts=6),
            "own labels": veil.fit_own_labels,
        },
        rounds=6,
        strongest=("own labels", "two broadcasts, no data"),
        generic={},  # the attackers above are stronger
        rebuilders={"two broadcasts, own records": rebuild_veiled_record},
        leaks={"V-diff, two broadcasts": from_canonical_difference},
        shadows="plain",
    ),
    "ppdl": Attackers(
        generic={},  # clients receive the true model
        rebuilders={"rounds stacked": rebuild_selected_record},
        rebuild_rounds=6,
        leaks=MASKED_LEAKS,
    ),
    "dbcl": Attackers(
        models={"sketches stacked": dbcl.stack_sketches},
        rounds=6,
        strongest=("sketches stacked",),
        generic={},  # the mean of two sketches is not a sketch, and calibration adds nothing (docs/audit.md)
        rebuilders={"sketches stacked": dbcl.rebuild_record},
        rebuild_rounds=6,
    ),
    "spn": Attackers(generic={}),  # clients receive the true model
    **dict.fromkeys(
        ("nvflare:PercentilePrivacy", "nvflare:SVTPrivacy"), replace(STACKED_ATTACKERS, leaks=MASKED_LEAKS)
    ),
    **dict.fromkeys(("flower:LocalDpMod", "flower:fixedclipping_mod"), STACKED_ATTACKERS),
    "topk": replace(STACKED_ATTACKERS, rebuilders={"rounds summed": rebuild_delayed_record}, leaks=MASKED_LEAKS),
    "int8": Attackers(generic={}),  # rounding to 8 bits hides nothing from the published attacks
}


def find_attackers(record: Record) -> Attackers:
    """Return the attackers declared in a record, or those for the built-in defence with the same target."""
    if record.attackers is None:
        names = {record.target: record.name for record in INCLUDED.values()}
        return ATTACKERS.get(names.get(record.target, ""), Attackers())
    result = import_object(record.attackers, "a list of attackers", EXAMPLE)
    if not isinstance(result, Attackers):
        message = f"expected an instance of fedveil.attacks.registry.Attackers, got {type(result).__name__}"
        raise BadArgument(record.attackers, message, f"refer to an instance, such as {EXAMPLE}")
    return result


Views = tuple[dict[str, Observation], dict[str, str]]
"""The observations by attacker, and the reason why each remaining attacker does not apply or failed."""


def attacker_views(attackers: Attackers, observation: Observation) -> Views:
    """Run every attacker that estimates a model; the unchanged observation is labelled "as published"."""
    observations, reasons = {PUBLISHED: observation}, dict[str, str]()
    for label, attacker in {**attackers.models, **attackers.generic}.items():
        result = attempt(attacker, observation)
        if isinstance(result, str):
            reasons[label] = result
        else:
            observations[label] = result
    return observations, reasons
