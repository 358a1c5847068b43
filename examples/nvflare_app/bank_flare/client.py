"""The client, which defines a site's model and data; Fedveil does the rest."""

from typing import Any

from torch import Tensor, nn

from bank_flare.task import Settings, load_part, make_model, part_of
from fedveil.nvflare import Client


class BankClient(Client):
    """A site with its part of the data."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def make_model(self) -> nn.Module:
        """Build the network."""
        return make_model(Settings(**self.settings))

    def load_data(self, site: str) -> tuple[Tensor, Tensor]:
        """Load the site's records."""
        return load_part(Settings(**self.settings), site)

    def number(self, site: str) -> int:
        """Return the client's index in a federation in one process, so that batches have the same order."""
        return part_of(site)
