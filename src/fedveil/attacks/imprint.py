"""A hostile server that crafts the first layer so that differences of its gradient's rows are single records.

This is Robbing the Fed (Fowl et al. 2022, arXiv 2110.13057) within a given architecture: the server changes only the
values of the first two dense layers of a network with ReLU. All units of the first layer measure the same number h(x) =
<w, x>, and unit i is active if h(x) > c_i. The second layer treats all units alike, so every active unit has the same
derivative for a record. With sorted c_i, the gradient's rows i and i + 1 then differ only by the records with c_i <
h(x) <= c_{i+1}. If there is exactly one such record, it is the difference of the rows' weights divided by the
difference of their biases.

A sum over clients is one larger batch, so secure aggregation only fills the bins. A client cannot tell these weights
from others: its policy checks the architecture, not the values. Noise for differential privacy hides the records.
"""

import copy
import itertools
import math

import torch
from torch import Tensor, nn

from fedveil.attacks.batch_records import check_relu
from fedveil.attacks.first_layer import append_ones, first_linear, layer_rows
from fedveil.attacks.leaked_gradients import Leak
from fedveil.attacks.observation import DoesNotApply

MEAN_WEIGHT = 0.1  # mean weight of the second layer, times the number of units


def second_linear(model: nn.Module, path: str) -> nn.Linear:
    """Return the next layer with parameters, which must be a Linear."""
    layers = [(name, module) for name, module in model.named_modules() if any(True for _ in module.parameters(False))]
    next_modules = [module for (name, _), (_, module) in itertools.pairwise(layers) if name == path]
    if not next_modules or not isinstance(next_modules[0], nn.Linear):
        raise DoesNotApply("imprint", "no Linear follows the first layer", "use an MLP with ReLU")
    return next_modules[0]


@torch.no_grad()
def craft_imprint(model: nn.Module, plausible: Tensor, rng: torch.Generator) -> nn.Module:
    """Return a copy of a model whose first layer sorts records into bins, one per unit.

    The measurement w is random, with norm 1. The bins are equally likely if h(x) is normally distributed with the
    mean and standard deviation that it has for `plausible`, inputs that resemble the clients' records. The layers
    after the second are unchanged.
    """
    path, crafted_model = first_linear(model), copy.deepcopy(model)
    check_relu(model, path)
    first, second = crafted_model.get_submodule(path), second_linear(crafted_model, path)
    assert isinstance(first, nn.Linear)
    direction = torch.randn(first.in_features, generator=rng, dtype=torch.float64)
    direction = (direction / direction.norm()).to(first.weight)
    measurements = (plausible.flatten(1).to(first.weight) @ direction).double()
    units = first.out_features
    quantiles = torch.special.ndtri((torch.arange(units, dtype=torch.float64) + 0.5) / units)
    thresholds = measurements.mean() + measurements.std() * quantiles.to(measurements)
    first.weight.copy_(direction.expand_as(first.weight))
    first.bias.copy_(-thresholds)
    rows = torch.randn(second.out_features, generator=rng, dtype=torch.float64)
    second.weight.copy_(
        (MEAN_WEIGHT * rows / units / measurements.std().cpu()).to(second.weight)[:, None].expand_as(second.weight)
    )
    return crafted_model


def read_imprint(leak: Leak, path: str) -> Tensor:
    """Return one flattened record per nonempty bin; for a bin with several records, return their mean.

    Records below the first bin are lost, and a bin whose records' derivatives cancel is skipped. Rounding errors
    are relative to the whole sum, so bins with a much smaller derivative are skipped too.
    """
    gradient = layer_rows(leak.gradients, path)
    gradient = gradient[layer_rows(dict(leak.model.named_parameters()), path)[:, -1].argsort(descending=True)]
    bins = gradient - torch.cat([gradient[1:], torch.zeros_like(gradient[:1])])
    eps = torch.finfo(leak.gradients[f"{path}.bias"].dtype).eps
    is_nonempty = bins[:, -1].abs() > math.sqrt(eps) * gradient[:, -1].abs().max()
    return bins[is_nonempty, :-1] / bins[is_nonempty, -1:]


def imprint_bin(model: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """Return the number of crafted units that each record activates, which identifies its bin."""
    layer = layer_rows(dict(model.named_parameters()), path)
    return (append_ones(inputs) @ layer.T > 0).sum(1)
