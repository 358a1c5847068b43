"""What judging each client's update costs: rounds with limits over rounds without, clients apart in both.

    python -m benchmarks.limits [--quick] [--threads 2]

Five clients in one process, plain and veiled: MLP 48-50-50-50-1 with batches of 32, ResNet20 with BatchNorm on images
of 32 x 32 pixels with batches of 16. Without limits the noise is removed once, from the weighted sum; with limits once
for each client, and norms are taken. The last column is the server's part alone, what follows the clients' answers.
There is no bound.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.small import new_model
from benchmarks.timing import compare, interleave, machine, table
from fedveil import Federation, Limits
from fedveil.federation.limits import AGGREGATORS, aggregate
from fedveil.models import resnet

CLIENTS = 5
SHAPES = {"MLP": ((48,), 1, 32), "ResNet20": ((3, 32, 32), 10, 16)}  # a record, outputs, records of a batch


def federation(network: str, defence: str, limits: Limits | None) -> Federation:
    """Five clients and their server."""
    shape, outputs, batch = SHAPES[network]
    draw = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(batch, *shape, generator=draw), torch.randn(batch, outputs, generator=draw))
        for _ in range(CLIENTS)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = new_model() if network == "MLP" else resnet(20, 3, outputs)
    optimizer = partial(torch.optim.Adam, lr=1e-3, fused=True)
    return Federation(
        model, parts, defence, optimizer, loss="squared_error", batch_size=batch, limits=limits, fuse=False
    )


def server_part(run: Federation) -> Callable[[], object]:
    """Return the work that follows the clients' replies in a round."""
    clients = list(range(CLIENTS))
    defence_round = run.defence_server.start_round(run.model, clients)
    replies = list(run.engine.ask(0, defence_round, clients))
    updates, sizes = [reply.update for reply in replies], [float(reply.records) for reply in replies]

    def work() -> object:
        if run.limits is None:
            return defence_round.recover(updates, sizes)
        return aggregate(defence_round, replies, run.model, run.limits)

    return work


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables; there is no bound to miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description="The cost of limits.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    variants = {"no limits": None} | {name: Limits(name) for name in AGGREGATORS}
    rows = []
    for network in SHAPES:
        calls = 20 if network == "MLP" else 2
        for defence in ("plain", "veil"):
            runs = {name: federation(network, defence, limits) for name, limits in variants.items()}
            repetitions = 5 if arguments.quick else 15
            whole = compare(interleave({n: r.step for n, r in runs.items()}, repetitions, calls), "no limits")
            parts = {name: server_part(run) for name, run in runs.items()}
            server = compare(interleave(parts, repetitions, calls), "no limits")
            for name in variants:
                ms = [f"{found[name].seconds * 1e3:.2f}" for found in (whole, server)]
                rows.append([f"{network}, {defence}, {name}", ms[0], f"x{whole[name].ratio[1]:.2f}", ms[1]])
    print(table(["network, defence, limits", "round (ms)", "over no limits", "server's part (ms)"], rows))
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
