"""Train on Bank Marketing or digits with NVIDIA FLARE, in the simulator or, with --kit, in a deployment.

See docs/nvflare.md.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).parent))

from bank_flare.client import BankClient
from bank_flare.server import BankServer
from bank_flare.task import Settings

from fedveil.nvflare import Job, simulate, submit


def main(
    settings: Annotated[Settings, tyro.conf.arg(name="")] = Settings(),  # noqa: B008  (it is frozen)
    kit: Path | None = None,
    user: str = "admin@lab.org",
    installed: bool = False,
) -> None:
    """Train in the simulator or in a deployment.

    Args:
        settings: settings of the run.
        kit: startup kit of the user who submits the job; without it, the job runs in the simulator.
        user: name of that user.
        installed: send no code with the job, because bank_flare is installed on the server and the sites.
    """
    out = str(Path(settings.out).absolute())
    values = asdict(settings) | {"out": out}
    job = Job("bank", BankServer(values), BankClient(values), sites=settings.sites, installed=installed)
    if kit is None:
        simulate(job, settings.sites, Path(out).with_name(f"{Path(out).name}-simulator"))
    else:
        submit(job, kit, user)


if __name__ == "__main__":
    tyro.cli(main)
