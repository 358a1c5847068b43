"""Losses by nodes, in place of decoys: error against nodes, what keeps the count low in training, and what nodes cost.

    python -m benchmarks.nodes [--quick] [--threads 2] [--svg docs/losses-nodes.svg]

Digits, MLP 64-50-50-50-10, five clients, Adam 1e-3, cross-entropy, batch 32. The first table trains plainly, stops
after some epochs and recovers one batch's gradient with a fixed count, in float64. The second trains veiled, float32,
with counts that adapt. The third is ResNet20: a client's step over its ideal, one forward and K backward passes.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedveil
from benchmarks.picture import draw
from benchmarks.speed import TOLERANCE, Case, against_ideal, node_count, passes_of, plain_step, residual
from benchmarks.timing import compare, machine, table, verdict
from fedveil.data import Data, load, split
from fedveil.defences import Plain, Veil
from fedveil.federation import Federation
from fedveil.models import mlp

COUNTS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
STAGES = (1, 5, 20, 60)
SECRETS = 12
BOUND = 1.15


def federation(data: Data, defence: Any) -> Federation:
    """Five clients and their server, always from the same start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(64, 10, hidden=50)
    parts = [(data.train.inputs[r], data.train.targets[r]) for r in split(data, 5, seed=0)]
    return Federation(model, parts, defence, partial(torch.optim.Adam, lr=1e-3), loss="cross_entropy")


def gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Plain autograd's, flat."""
    loss = nn.functional.cross_entropy(model(inputs), targets)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def errors(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> list[float]:
    """Relative error of the recovered gradient for a few secrets."""
    plan, truth, found = fedveil.analyse(model, inputs), gradient(model, inputs, targets), []
    for _ in range(SECRETS):
        secret = fedveil.draw_secret(plan, "cross_entropy", nodes=count)
        update = fedveil.client_step(model, fedveil.perturb(model, secret), inputs, targets)
        gradients = fedveil.recover(secret, [update]).gradients
        flat = torch.cat([gradients[name].reshape(-1) for name, _ in model.named_parameters()])
        found.append(float((flat - truth).norm() / truth.norm()))
    return found


def error_table(data: Data, quick: bool) -> dict[str, list[tuple[float, float]]]:
    """For each stage of a plain run, (nodes, largest error of a few secrets)."""
    run = federation(data, Plain())
    series: dict[str, list[tuple[float, float]]] = {}
    inputs, targets = data.train.inputs[:160].double(), data.train.targets[:160]
    for epochs in STAGES[: 2 if quick else None]:
        run.fit(epochs)
        model = mlp(64, 10, hidden=50).double()
        model.load_state_dict({name: value.double() for name, value in run.model.state_dict().items()})
        name = f"after {epochs} epoch{'s' if epochs > 1 else ''}"
        series[name] = [(count, max(errors(model, inputs, targets, count))) for count in COUNTS]
    rows = [[str(c), *(f"{line[i][1]:.0e}" for line in series.values())] for i, c in enumerate(COUNTS)]
    print(table(["nodes", *series], rows))
    return series


def given_away(run: Federation, spread: float) -> float:
    """Bits that the interval reveals about the offset: - log2 of the chance of being inside, 300 secrets."""
    plan, inside = run.defence.plan, 0  # type: ignore[attr-defined]
    for _ in range(300):
        secret = fedveil.draw_secret(plan, "cross_entropy", spread=1e3, nodes=8)
        fedveil.perturb(run.model, secret)
        assert secret._sent is not None
        inside += abs(secret._sent.how.place or 0.0) * 1e3 <= spread
    return -math.log2(max(inside, 1) / 300)


def agreement(run: Federation, data: Data, spread: float) -> float:
    """Share of test records on which the base predicts the same as the true model, mean of 50 secrets."""
    plan, found = run.defence.plan, []  # type: ignore[attr-defined]
    with torch.no_grad():
        truth = run.model(data.test.inputs).argmax(1)
        for _ in range(50):
            secret = fedveil.draw_secret(plan, "cross_entropy", spread=spread, nodes=8)
            view = fedveil.client_view(run.model, fedveil.perturb(run.model, secret), centred=True)
            found.append(float((view(data.test.inputs).argmax(1) == truth).double().mean()))
    return statistics.mean(found)


def growth_table(data: Data, quick: bool) -> None:
    """Nodes over a training run for several settings; the first has the tolerance and nothing else."""
    settings: list[dict[str, Any]] = [{}, {"spread": 1.0}, {"spread": 4.0}, {"multiplicative": 1.5}]
    settings += [{"multiplicative": 10.0}, {"tolerance": 1e-4}, {"tolerance": 1e-6}]
    rows = []
    for setting in settings[: 2 if quick else None]:
        run = federation(data, Veil(**{"tolerance": TOLERANCE, **setting}))
        history = run.fit(6 if quick else 60)
        counts = [record["nodes"] for record in history.records]
        fifth = len(counts) // 5
        means = [f"{statistics.mean(counts[k * fifth : (k + 1) * fifth]):.0f}" for k in range(5)]
        spread = setting.get("spread", 2.0)
        repeated = sum(record.get("repeated", 0) for record in history.records)
        largest = max(record["error"] for record in history.records)
        name = ", ".join(f"{key} {value:g}" for key, value in setting.items()) or f"tolerance {TOLERANCE:g}"
        bits, same = given_away(run, spread), agreement(run, data, spread)
        rows.append([name, *means, str(max(counts)), str(repeated), f"{largest:.0e}", f"{bits:.2f}", f"{same:.3f}"])
    header = ["setting", *[f"nodes {k}/5" for k in range(1, 6)], "most", "repeated", "largest error"]
    print(table([*header, "bits", "base agrees"], rows))


def cost_rows(case: Case, bound: float | None) -> list[list[str]]:
    """Passes and time over a plain step, each client step against its ideal."""
    model, plan = case.model, fedveil.analyse(case.model, case.inputs)
    secrets = {f"squared error, m = {m}": fedveil.draw_secret(plan, groups=m) for m in (1, 3, 10)}
    for tolerance in (1e-4, 1e-6, 1e-8):
        count = node_count(case, "cross_entropy", tolerance)
        secrets[f"cross-entropy, {tolerance:.0e}"] = fedveil.draw_secret(plan, "cross_entropy", nodes=count)
    sent = {name: fedveil.perturb(model, secret) for name, secret in secrets.items()}
    timings, found = against_ideal(case, sent, {"plain": plain_step(case)})
    over = compare(timings, "plain")
    rows = []
    for name, summary in found.items():
        low, middle, high = summary.ratio
        ratio = f"x{middle:.2f} [{low:.2f}, {high:.2f}]"
        passes = str(passes_of(sent[name]))
        rows.append(
            [case.name, name, passes, f"x{over[name].ratio[1]:.2f}", ratio, *verdict(middle, bound), timings.kept]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description="Losses by nodes.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, short runs")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch where time is measured (default 2)")
    parser.add_argument("--svg", type=Path, help="write the picture of the first table here")
    parser.add_argument("--only", choices=("errors", "growth", "cost"), help="one of the tables")
    arguments = parser.parse_args(argv)
    quick, only = arguments.quick, arguments.only
    torch.set_num_threads(1)
    data = load("digits")
    if only in (None, "errors"):
        series = error_table(data, quick)
        if arguments.svg:
            draw(arguments.svg, "nodes", "largest relative error of 12 secrets", series)
    if only in (None, "growth"):
        growth_table(data, quick)
    if only not in (None, "cost"):
        return 0
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    few = dict(repetitions=2 if quick else 6, calls=1)
    rows = cost_rows(replace(residual(quick), **few), BOUND)
    rows += cost_rows(replace(residual(quick, "none"), **few), BOUND)
    print(table(["network", "loss", "passes", "over plain", "over ideal", "bound", "", "repetitions"], rows))
    print(machine())
    return int(any("OVER" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
