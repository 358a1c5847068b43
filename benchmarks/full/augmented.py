"""Augmentation by the clients: random crops and flips that depend only on the seed, the client and the round.

A data set that draws from torch's global generator draws other numbers after a resume, because a checkpoint does not
contain that generator. Here nothing is saved: the numbers of a round are drawn again whenever its records are read.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from fedveil.records.shards import generator

PADDING = 4


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """A client's images, padded by four pixels, cropped to their size at random, and flipped with probability 1/2.

    Args:
        images: the client's images, of shape (n, channels, height, width).
        targets: their classes.
        seed: seed of the run.
        client: index of the client.
    """

    def __init__(self, images: Tensor, targets: Tensor, seed: int, client: int) -> None:
        self.images, self.targets, self._key = images, targets, (seed, client)
        self.current_round: Callable[[], int] = lambda: 0  # replaced once the federation exists

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the records of a batch, as they are in the current round."""
        rows = torch.as_tensor(indices)
        images = crop_and_flip(self.images[rows], generator("augmentation", *self._key, self.current_round()))
        return list(zip(images, self.targets[rows], strict=True))


def crop_and_flip(images: Tensor, random: torch.Generator) -> Tensor:
    """Return randomly cropped and flipped images; padding is 0, the mean of a standardised channel."""
    height, width = images.shape[-2:]
    corners = torch.randint(2 * PADDING + 1, (len(images), 2), generator=random).tolist()
    flipped = torch.rand(len(images), 1, 1, 1, generator=random) < 0.5
    padded = pad(images, (PADDING,) * 4)
    crops = [own[:, top : top + height, left : left + width] for own, (top, left) in zip(padded, corners, strict=True)]
    found = torch.stack(crops)
    return torch.where(flipped, found.flip(-1), found)
