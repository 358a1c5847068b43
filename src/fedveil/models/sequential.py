"""Networks without branches: the paper's perceptron, a convolutional network, and LeNet for gradient inversion."""

import itertools

from torch import nn

from fedveil.checks import check_choice, check_count

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}
CHANNELS, KERNEL, STRIDES, INIT_BOUND = 12, 5, (2, 2, 1), 0.5  # settings of `lenet`


def mlp(inputs: int, outputs: int, *, layers: int = 3, hidden: int = 50, bias: bool = True) -> nn.Sequential:
    """Build a ReLU network with `layers` hidden layers of `hidden` units and a linear head.

    `layers` is L in the paper (3, 5 or 7), counted as in its published code: L hidden layers and L + 1 weight matrices.
    The paper's networks have no biases (`bias=False`).
    """
    check_count("mlp", "layers", layers)
    stack: list[nn.Module] = []
    for in_features, out_features in itertools.pairwise([inputs, *[hidden] * layers]):
        stack += [nn.Linear(in_features, out_features, bias=bias), nn.ReLU()]
    return nn.Sequential(*stack, nn.Linear(hidden, outputs, bias=bias))


def cnn(channels: int = 3, outputs: int = 10, *, width: int = 16, size: int = 32) -> nn.Sequential:
    """Build a network with three convolutions, two max-pooling layers and two linear layers, for square images."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 4) ** 2, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, outputs),
    )


def lenet(channels: int = 3, outputs: int = 10, *, size: int = 32, activation: str = "relu") -> nn.Sequential:
    """Build the network on which gradient inversion was first demonstrated (Zhu et al. 2019, arXiv 1906.08935).

    It has three 5 x 5 convolutions with 12 channels and strides 2, 2 and 1, and a linear head. With sigmoids, all
    parameters are initialised uniformly in [-1/2, 1/2], as published, so that the gradients of all layers have similar
    scales. With ReLU, the parameters keep PyTorch's default initialisation.

    The published network uses only sigmoids. The ReLU variant was added because a veil can use factors with ReLU.

    Args:
        channels: number of image channels.
        outputs: number of outputs.
        size: height and width of the images in pixels.
        activation: "relu" or "sigmoid".
    """
    check_choice("lenet", "activation", activation, ACTIVATIONS)
    stack: list[nn.Module] = []
    in_channels, side = channels, size
    for stride in STRIDES:
        conv = nn.Conv2d(in_channels, CHANNELS, KERNEL, stride=stride, padding=KERNEL // 2)
        stack += [conv, ACTIVATIONS[activation]()]
        in_channels, side = CHANNELS, -(-side // stride)
    net = nn.Sequential(*stack, nn.Flatten(), nn.Linear(CHANNELS * side * side, outputs))
    if activation == "sigmoid":
        for parameter in net.parameters():
            nn.init.uniform_(parameter, -INIT_BOUND, INIT_BOUND)
    return net
