"""The network on which gradient inversion is published (Zhu et al. 2019, arXiv 1906.08935)."""

from torch import nn

from fedveil.errors import BadArgument

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}
CHANNELS, KERNEL, STRIDES, SPREAD = 12, 5, (2, 2, 1), 0.5


def lenet(channels: int = 3, outputs: int = 10, *, size: int = 32, activation: str = "relu") -> nn.Sequential:
    """Build three convolutions of 12 channels and 5 x 5 pixels with strides 2, 2, 1, and a linear head.

    With sigmoids, all parameters start uniform in [-1/2, 1/2], as published, so that the gradients of all layers are of
    similar size. With ReLU they start with PyTorch's defaults.

    Differs from the published network, which has sigmoids only; with ReLU a veil can use factors.

    Args:
        channels: of the images.
        outputs: of the head.
        size: pixels per side.
        activation: "relu" or "sigmoid".
    """
    if activation not in ACTIVATIONS:
        raise BadArgument("lenet", f"unknown activation {activation!r}", f"choose {' or '.join(ACTIVATIONS)}")
    stack: list[nn.Module] = []
    before, side = channels, size
    for stride in STRIDES:
        conv = nn.Conv2d(before, CHANNELS, KERNEL, stride=stride, padding=KERNEL // 2)
        stack += [conv, ACTIVATIONS[activation]()]
        before, side = CHANNELS, -(-side // stride)
    net = nn.Sequential(*stack, nn.Flatten(), nn.Linear(CHANNELS * side * side, outputs))
    if activation == "sigmoid":
        for parameter in net.parameters():
            nn.init.uniform_(parameter, -SPREAD, SPREAD)
    return net
