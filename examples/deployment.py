"""Deployment: server and two sites as processes of their own, over NVIDIA FLARE.

- Shows: what a deployed federation consists of: a class for the server, a class for the sites, and a job.
- Who attacks: nobody here. What is protected: sites receive a masked model, never the model; their records stay there.
- Needs: pip install 'fedveil[nvflare]'
- Last line: 40 rounds with 2 sites, each in a process of its own: test accuracy 94.2 %

Here FLARE's simulator starts the processes, without certificates. docs/nvflare.md goes on to three machines with mTLS:
the classes stay as they are, and `submit(job, kit, user)` takes the place of `simulate`.
"""

import json
import sys
import tempfile
from pathlib import Path

try:
    from nvflare.collab import collab
except ModuleNotFoundError:
    sys.exit("deployment.py needs NVIDIA FLARE: pip install 'fedveil[nvflare]'")

import torch
from torch import Tensor, nn

from fedveil.data import load, split
from fedveil.nvflare import Client, Job, Server, simulate

SITES = 2


def network() -> nn.Module:
    """What server and sites agree on; a site fills it with the masked values that it receives."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Site(Client):
    """A site: its network and its records, which stay there."""

    def make_model(self) -> nn.Module:
        """The network."""
        return network()

    def load_data(self, site: str) -> tuple[Tensor, Tensor]:
        """The records of site-1, site-2 ...: here its part of digits, elsewhere what the site has on its disk."""
        data = load("digits")
        return data.train.take(split(data, SITES)[int(site.removeprefix("site-")) - 1])


class Trainer:
    """The server: the model, its optimiser, its defence and its test data."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @collab.main
    def run(self) -> None:
        """What FLARE calls when all sites are there."""
        test = load("digits").test
        adam = lambda p: torch.optim.Adam(p, 1e-2)  # noqa: E731
        server = Server(network(), test.inputs[:2], "veil", adam, loss="cross_entropy", wait_for=SITES)
        server.fit(rounds=40, test=test, folder=Path(self.folder))
        Path(self.folder, "last.json").write_text(json.dumps(server.history.last))
        server.close()


def main() -> None:
    """Start the processes, and read what the server wrote."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(Job("digits", Trainer(folder), Site(), sites=SITES), SITES, Path(folder) / "simulator")
        last = json.loads(Path(folder, "last.json").read_text())
    accuracy = f"{100 * last['accuracy']:.1f} %"
    print(f"{last['round']} rounds with {SITES} sites, each in a process of its own: test accuracy {accuracy}")


if __name__ == "__main__":  # FLARE imports these classes in every process, so they need a module with a name
    import deployment

    deployment.main()
