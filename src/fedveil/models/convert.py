"""Convert models with BatchNorm to models without it."""

import copy
import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from fedveil.checks import check_count

GROUPS = 16  # the default, as in De et al. (arXiv 2204.13650)


def with_group_norm(model: nn.Module, groups: int = GROUPS) -> nn.Module:
    """Return a copy of a model with each BatchNorm, which couples the records of a batch, replaced by GroupNorm.

    Weights and biases are kept, but running statistics are not, so the converted model must be trained.

    Args:
        model: any model.
        groups: number of channel groups. If it does not divide a layer's number of channels, the greatest common
            divisor of the two is used.

    >>> from torch import nn
    >>> with_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), groups=4)[1].num_groups
    4
    """
    check_count("with_group_norm", "groups", groups)
    if isinstance(model, _NormBase) and not isinstance(model, _InstanceNorm):
        return _convert(model, groups)
    result = copy.deepcopy(model)
    for parent in list(result.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _NormBase) and not isinstance(child, _InstanceNorm):
                setattr(parent, name, _convert(child, groups))
    return result


def _convert(norm: _NormBase, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    result = nn.GroupNorm(math.gcd(groups, channels), channels, norm.eps, affine=norm.affine)
    result.train(norm.training)
    if norm.affine:
        result.weight, result.bias = norm.weight, norm.bias
    return result
