"""Deployment: a server and two sites as separate processes on NVIDIA FLARE.

- Shows: the parts of a deployed federation: a class for the server, a class for the sites, and a job.
- Who attacks: nobody here. What is protected: sites receive a perturbed model; their records never leave them.
- Needs: pip install 'fedveil[nvflare]'
- Last line: 40 rounds with 2 sites, each in a separate process: test accuracy 95.0 %

Here FLARE's simulator starts the processes, without certificates. docs/nvflare.md continues with a deployment that uses
mTLS: the classes stay the same, and `submit(job, kit, user)` replaces `simulate`.
"""

import sys
import tempfile
from pathlib import Path

try:
    from nvflare.collab import collab
except ModuleNotFoundError:
    sys.exit("deployment.py needs NVIDIA FLARE: pip install 'fedveil[nvflare]'")

import torch
from torch import Tensor, nn

import fedveil
from fedveil.data import load, split
from fedveil.nvflare import Client, Job, Server, simulate

SITES, ROUNDS = 2, 40


def network() -> nn.Module:
    """Build the network that the server and sites agree on; a site fills it with the perturbed values it receives."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Site(Client):
    """A site with its network and its records, which never leave the site."""

    def make_model(self) -> nn.Module:
        """Build the network."""
        return network()

    def load_data(self, site: str) -> tuple[Tensor, Tensor]:
        """Load the records of site-1, site-2 and so on: part of digits here, but the site's own files in practice."""
        data = load("digits")
        return data.train.take(split(data, SITES)[int(site.removeprefix("site-")) - 1])


class Trainer:
    """The server, with the model, its optimizer, its defence and its test data."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @collab.main
    def run(self) -> None:
        """Train; FLARE calls this once all sites are connected."""
        data, model = load("digits"), network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        inputs = data.test.inputs[:2]
        server = Server(collab.clients, model, inputs, "veil", optimizer, loss="cross_entropy", wait_for=SITES)
        server.fit(rounds=ROUNDS, test=(data.test.inputs, data.test.targets), folder=self.folder, resume=True)
        server.close()


def main() -> None:
    """Start the processes, then load the model that the server has written."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(Job("digits", Trainer(folder), Site(), sites=SITES), SITES, Path(folder) / "simulator")
        model = fedveil.load_model(folder, model=network())
    inputs, targets = load("digits").test
    accuracy = 100 * (model(inputs).argmax(1) == targets).float().mean()
    print(f"{ROUNDS} rounds with {SITES} sites, each in a separate process: test accuracy {accuracy:.1f} %")


if __name__ == "__main__":  # FLARE imports these classes in every process, so they need an importable module
    import deployment

    deployment.main()
