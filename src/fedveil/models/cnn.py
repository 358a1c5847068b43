"""A small convolutional network."""

from torch import nn


def cnn(channels: int = 3, outputs: int = 10, *, width: int = 16, size: int = 32) -> nn.Sequential:
    """Build three convolutions with ReLU, two max-poolings and two linear layers, for square images from 4 x 4 on."""
    side = size // 4
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
        nn.Linear(2 * width * side * side, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, outputs),
    )
