"""Networks whose last layer is a convolution: an answer for each place, or their average."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, images, normal


def double_conv(before: int, after: int) -> nn.Sequential:
    """Two convolutions with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Down and up, with skip connections."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.inc = double_conv(3, width)
        self.down1 = double_conv(width, 2 * width)
        self.down2 = double_conv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv1 = double_conv(4 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv2 = double_conv(2 * width, width)
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


class Fcn(nn.Module):
    """Scores on a coarse grid, interpolated to the size of the image."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=2, dilation=2),
            nn.ReLU(),
        )
        self.classifier = nn.Conv2d(32, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classifier(self.backbone(x))
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)


class ConvAutoencoder(nn.Module):
    """Convolutions in, transposed convolutions out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 3, stride=2, padding=1, output_padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class WaveNetLayer(nn.Module):
    """A dilated causal convolution, tanh times sigmoid, a residual and a skip."""

    def __init__(self, channels: int, dilation: int, last: bool) -> None:
        super().__init__()
        self.padding = dilation
        self.filter = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.gate = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.residual = None if last else nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        past = F.pad(x, (self.padding, 0))
        y = torch.tanh(self.filter(past)) * torch.sigmoid(self.gate(past))
        return x if self.residual is None else x + self.residual(y), self.skip(y)


class WaveNet(nn.Module):
    """Skips are added and pass two convolutions."""

    def __init__(self, classes: int = 12, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.layers = nn.ModuleList([WaveNetLayer(channels, 2**number, number == 3) for number in range(4)])
        self.end1 = nn.Conv1d(2 * channels, 2 * channels, 1)
        self.end2 = nn.Conv1d(2 * channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for layer in self.layers:
            x, skip = layer(x)
            skips.append(skip)
        return self.end2(F.relu(self.end1(F.relu(torch.stack(skips).sum(dim=0)))))


class AllConvolutional(nn.Module):
    """A convolution for classes, then the average over the image."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Conv2d(32, classes, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.classifier(self.features(x))).flatten(1)


PIXELWISE = (
    Architecture("UNet", "convolution", UNet, images(16), quick=True),
    Architecture("FCN, bilinear", "convolution", Fcn, images(16)),
    Architecture("autoencoder, ConvTranspose2d", "convolution", ConvAutoencoder, images(16)),
    Architecture("WaveNet", "convolution", WaveNet, normal(1, 24)),
    Architecture("convolution as head, average pool", "convolution", AllConvolutional, images(12)),
)
