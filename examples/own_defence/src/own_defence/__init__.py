"""A toy defence: fresh secret numbers are added to the model's outputs in every round."""

from fedveil.defences.registry import Record

RECORD = Record(
    "shifted",
    "secret numbers are added to the model's outputs",
    "own_defence.defence:Shifted",
    attackers="own_defence.attack:ATTACKERS",
)
