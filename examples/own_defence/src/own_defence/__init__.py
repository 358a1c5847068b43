"""A toy defence that adds new secret numbers to the model's outputs in every round."""

from fedveil.defences.registry import Record

RECORD = Record(
    "shifted",
    "add secret numbers to the model's outputs",
    "own_defence.defence:Shifted",
    attackers="own_defence.attack:ATTACKERS",
)
