"""Rounds per second of the same federation in Flower's simulation, where the extra is installed.

    pip install 'flwr[simulation]==1.41.0'
    python -m benchmarks.flower [--rounds 30]

Ten clients with the data, the model and the batch of benchmarks.engine. A round sends the weights to every client as
Flower messages and gets gradients back; the server averages them and takes an Adam step. Plain only: Flower's cost does
not depend on the content of its messages.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.small import BATCH, CLIENTS, new_model, prepared


def installed() -> bool:
    """Whether Flower's simulation can run here."""
    return all(importlib.util.find_spec(name) for name in ("flwr", "ray"))


def client_app() -> Any:
    """Weights in, gradients of one batch out."""
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, data = prepared()
        inputs, targets = data[int(context.node_config["partition-id"])]
        start = int(message.content["round"]["number"]) * BATCH % len(inputs)
        weights = message.content["model"]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name].numpy()))
        outputs = model(inputs[start : start + BATCH])
        loss = (outputs - targets[start : start + BATCH]).square().sum() / (2 * BATCH)
        found = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        arrays = {name: Array(g.numpy()) for name, g in zip(names, found, strict=True)}
        return Message(content=RecordDict({"gradients": ArrayRecord(arrays)}), reply_to=message)

    return app


def server_app(rounds: int, times: list[float]) -> Any:
    """The server's loop; seconds of each round go to `times`."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.serverapp import Grid, ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = new_model()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
        while len(nodes := list(grid.get_node_ids())) < CLIENTS:
            time.sleep(0.1)
        for number in range(rounds):
            began = time.perf_counter()
            arrays = ArrayRecord({name: Array(p.detach().numpy()) for name, p in model.named_parameters()})
            content = RecordDict({"model": arrays, "round": ConfigRecord({"number": number})})
            replies = list(
                grid.send_and_receive(
                    [Message(content, dst_node_id=node, message_type="train", group_id=str(number)) for node in nodes],
                    timeout=300.0,
                )
            )
            failed = [str(reply.error.reason) for reply in replies if reply.has_error()]
            if failed or len(replies) != CLIENTS:
                raise RuntimeError(f"{len(replies)} of {CLIENTS} clients answered; errors: {failed[:1]}")
            for name, parameter in model.named_parameters():
                found = [torch.from_numpy(reply.content["gradients"][name].numpy()) for reply in replies]
                parameter.grad = torch.stack(found).mean(0)
            optimizer.step()
            times.append(time.perf_counter() - began)

    return app


def rounds_a_second(rounds: int) -> float:
    """Median over the rounds after the first five, in which Ray starts its workers."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    from flwr.simulation import run_simulation

    times: list[float] = []
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app(rounds, times), client_app(), num_supernodes=CLIENTS, backend_config=resources)
    steady = sorted(times[5:])
    return 1 / steady[len(steady) // 2]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rounds per second."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flower", description="Flower's rounds per second.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds (default 30)")
    arguments = parser.parse_args(argv)
    if not installed():
        print("Flower's simulation is not installed: pip install 'flwr[simulation]==1.41.0'")
        return 0
    print(f"Flower's simulation: {rounds_a_second(arguments.rounds):.1f} rounds/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
