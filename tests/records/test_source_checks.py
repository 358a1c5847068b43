"""Records of several clients: one structure, one row per target, finite numbers."""

import copy

import pytest
import torch
from tests.forms import FORMS, Apart, network, records, reformed

from fedveil import Federation
from fedveil.errors import BadArgument


def changed(number, change):
    """Two clients with dicts of two tensors, of which one is changed."""
    clients = [(dict(inputs), targets) for inputs, targets in reformed(records((4, 5)), FORMS["dict"][1])]
    inputs, targets = clients[number]
    clients[number] = (change(inputs), targets)
    return clients


def with_value(place, value):
    def change(inputs):
        inputs = copy.deepcopy(inputs)
        inputs["b"][place] = value
        return inputs

    return change


TENSOR, TUPLE = records((4,))[0], reformed(records((4,)), FORMS["tuple"][1])[0]


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        (changed(1, lambda x: {"a": x["a"], "b": x["b"][:3]}), r"client 1: there are 3 records in inputs\['b'\] and 5"),
        (changed(0, lambda x: {**x, "b": torch.tensor(1.0)}), r"client 0: there are 0 records in inputs\['b'\]"),
        (changed(1, lambda x: {"a": x["a"]}), r"client 1: inputs\['b'\] is missing, that of client 0 is float of sh"),
        (changed(1, lambda x: {**x, "c": x["a"]}), r"client 1: inputs\['c'\] is float .*, that of client 0 is missing"),
        (changed(1, lambda x: {**x, "b": x["a"]}), r"client 1: inputs\['b'\] is float of shape \(2,\), .*\(4,\)"),
        (changed(1, lambda x: {**x, "b": x["b"].long()}), r"client 1: inputs\['b'\] is integer of .*0 is float of"),
        (changed(1, lambda x: {**x, "b": None}), r"client 1: inputs\['b'\] is None, that of client 0 is float"),
        (changed(0, lambda x: {**x, "b": {1, 2}}), r"client 0: inputs\['b'\] is a set, not a tensor"),
        (changed(1, with_value((2, 1), torch.nan)), r"client 1, record 2: inputs\['b'\] hold NaN or infinity"),
        (changed(0, with_value((3, 0), torch.inf)), r"client 0, record 3: inputs\['b'\] hold NaN or infinity"),
        (changed(0, lambda x: {}), "client 0: inputs, a dict, hold no tensor"),
        (changed(0, lambda x: 3), "client 0: inputs, a int, hold no tensor"),
        ([TENSOR, TUPLE], "client 1: inputs is missing, that of client 0 is float"),
        ([TUPLE, TENSOR], r"client 1: inputs\[0\] is missing, that of client 0 is float"),
    ],
)
@pytest.mark.parametrize("classes", [False, True], ids=["numbers", "classes"])
def test_inputs_that_do_not_belong_together_are_named_before_the_model_is_called(clients, text, classes):
    if classes:  # for these Federation asks the model for the shape of its outputs
        clients = [(inputs, targets.argmax(1)) for inputs, targets in clients]
    with pytest.raises(BadArgument, match=text):
        Federation(network(Apart), clients, "plain")
