"""A compiled, scripted or parallel module is refused at once, with the module to pass in its place."""

import re

import pytest
import torch
from torch import nn

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def net():
    return mlp(4, 2, hidden=8)


def compiled_in_place():
    model = net()
    model.compile(backend="eager")
    return model


def inner():
    return nn.Sequential(torch.compile(nn.Linear(4, 8), backend="eager"), nn.ReLU(), nn.Linear(8, 2))


WRAPPED = {
    "torch.compile": (lambda: torch.compile(net(), backend="eager"), "made by torch.compile", "model._orig_mod"),
    "compile in place": (compiled_in_place, "compiled in place", "model._compiled_call_impl = None"),
    "script": (lambda: torch.jit.script(net()), "is a ScriptModule", "before torch.jit.script"),
    "DataParallel": (lambda: nn.DataParallel(net()), "wrapped in DataParallel", "model.module"),
    "a layer": (inner, "layer '0' of the model was made by torch.compile", "model.get_submodule('0')._orig_mod"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_module_that_stands_for_another_is_refused_with_its_fix(name):
    make, text, fix = WRAPPED[name]
    model, records = make(), (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)
    for call in (
        lambda: fedveil.Federation(model, [records], "plain"),
        lambda: fedveil.Federation(model, [records], "veil"),
        lambda: fedveil.analyse(model, records[0]),
    ):
        with pytest.raises(BadArgument, match=f"(?s){re.escape(text)}.*Fix: .*{re.escape(fix)}"):
            call()


@pytest.mark.parametrize("name", ["torch.compile", "compile in place", "DataParallel"])
def test_what_the_fix_names_trains(name):
    model = WRAPPED[name][0]()
    records = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    with pytest.raises(BadArgument) as caught:
        fedveil.Federation(model, [records])
    if name == "compile in place":
        model._compiled_call_impl = None
    else:
        model = eval(re.search(r"model\.\w+", caught.value.fix)[0], {"model": model})
    assert len(fedveil.Federation(model, [records]).fit(2).records) == 2
