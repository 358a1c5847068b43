"""Segmentation: a small U-Net classifies every pixel as background, disc or cross.

- Shows: one class per pixel, a skip connection, BatchNorm, DataLoaders as clients, a schedule; with and without a veil.
- Who attacks: nobody here. What is protected: clients compute on a perturbed network, never on the model.
- Needs: pip install fedveil
- Last line: mean IoU: plain 0.89, veil 0.89; pixel accuracy: plain 98.0 %, veil 98.0 %
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedveil

SIDE, CLASSES, EPOCHS = 20, ("background", "disc", "cross"), 8
RANGES = (4, 16), (4, 16), (3, 6)  # ranges of a shape's row, column and size


def block(channels: int, out: int) -> nn.Module:
    """Build a block with a convolution, a BatchNorm and a ReLU."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class UNet(nn.Module):
    """A U-Net with one level, which concatenates fine and upsampled coarse features."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(block(1, 8), block(8, 8))
        self.coarse = nn.Sequential(nn.MaxPool2d(2), block(8, 16), block(16, 16), nn.ConvTranspose2d(16, 8, 2, 2))
        self.head = nn.Sequential(block(16, 16), nn.Conv2d(16, len(CLASSES), 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class and pixel: (n, classes, height, width)."""
        fine = self.fine(images)
        return self.head(torch.cat([fine, self.coarse(fine)], 1))


def shapes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw noisy images of a disc with a cross on top, and return them with the class of every pixel."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    classes = torch.zeros(count, SIDE, SIDE, dtype=torch.long)
    for label in (1, 2):
        top, left, size = (torch.randint(low, high, (count, 1, 1), generator=generator) for low, high in RANGES)
        down, across = (rows - top).abs(), (columns - left).abs()
        disc = down**2 + across**2 <= size**2
        cross = (torch.minimum(down, across) <= 1) & (torch.maximum(down, across) <= size + 1)
        classes[disc if label == 1 else cross] = label
    images = (classes > 0).float() + 0.2 * torch.randn(classes.shape, generator=generator)
    return images.unsqueeze(1), classes


def mean_iou(answers: Tensor, classes: Tensor) -> float:
    """Return the intersection over union of predicted and true classes, averaged over the classes."""
    pairs = [(answers == label, classes == label) for label in range(len(CLASSES))]
    return sum(float((found & true).sum() / (found | true).sum()) for found, true in pairs) / len(pairs)


generator = torch.Generator().manual_seed(0)
clients = [DataLoader(TensorDataset(*shapes(count, generator)), batch_size=16) for count in (200, 150, 100)]
images, classes = shapes(100, generator)
iou, right = [], []
for defence in ("plain", "veil"):
    torch.manual_seed(0)  # start both from the same weights
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    federation = fedveil.Federation(model, clients, defence, optimizer, schedule=schedule)
    history = federation.fit(EPOCHS, test=(images, classes))
    with torch.no_grad():
        answers = model.eval()(images).argmax(1)  # BatchNorm uses its running statistics
    iou.append(f"{defence} {mean_iou(answers, classes):.2f}")
    right.append(f"{defence} {100 * history.last['accuracy']:.1f} %")
# show the true and predicted classes of the first test image
for truth, answer in zip(classes[0], answers[0], strict=True):
    print("   ".join("".join(".o+"[label] for label in row) for row in (truth, answer)))
print(f"mean IoU: {', '.join(iou)}; pixel accuracy: {', '.join(right)}")
