"""An attack on a client's records: an ask for the gradient of a single record, which is a multiple of that record."""

import copy

import torch

from fedveil.defences.encoding import pack_model
from fedveil.federation.protocol import Answer, Request, read, write


def first_layer(model):
    """Its name."""
    return next(name for name, parameter in model.named_parameters() if parameter.dim() == 2).removesuffix(".weight")


def crafted(model):
    """The bytes of an ask with a batch of one record, and a first layer whose units are all active for any record."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_submodule(first_layer(model)).weight.zero_()
        model.get_submodule(first_layer(model)).bias.fill_(1.0)
    values, tensors = pack_model(model)
    ask = Request(
        session="theft", round=0, token="theft", defence="plain", settings={}, loss="squared_error", loss_settings={},
        whole_shard=False, batch_size=1, seed=0, privacy={}, secure={}, values=values, tensors=tensors,
    )  # fmt: skip
    return write(ask)


def stolen(answer, model):
    """The record in the bytes of an answer: the gradient of a unit's weights over that of its bias."""
    found = read(answer, Answer).tensors
    weights, slopes = (found[f"gradient/{first_layer(model)}.{name}"] for name in ("weight", "bias"))
    unit = slopes.abs().argmax()
    return weights[unit] / slopes[unit]


def holds(data, record):
    """Whether a record is one of a client's own."""
    inputs, _ = data
    return bool(((inputs - record).abs().amax(dim=1) < 1e-9).any())
