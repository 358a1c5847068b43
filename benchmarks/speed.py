"""What a veil costs: client_step against its ideal, and a whole round against a plain step.

    PYTHONPATH=src python -m benchmarks.speed [--quick] [--threads 2] [--only squared-error|cross-entropy]

Ideal is one forward and m + 2 backward passes of the plain network, measured in the same run. A whole round is
perturb, client_step and recover for one client; a plain step is forward, squared error and
autograd.grad. `analyse` runs once per model and is not timed. Float32, normal inputs, targets 0 or 1.

Cross-entropy, binary for the one output of the MLP, has as many backward passes as candidates: the true offset and its
decoys. The plain step has the same loss.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedveil
from benchmarks.timing import Summary, Timings, compare, interleave, machine, table, verdict
from fedveil.models import mlp, resnet
from fedveil.scheme import VeilSession

Function = Callable[[Tensor, Tensor], Tensor]
DECOYS = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A network with one batch, and how often to time it."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    repetitions: int
    calls: int


@dataclass(frozen=True)
class Row:
    """A ratio and the bound it must keep; None if it is shown for information."""

    what: str
    found: Summary
    bound: float | None
    kept: str


def perceptron(quick: bool) -> Case:
    """The paper's bank network, L = 3."""
    model = mlp(48, 1, layers=3, hidden=50, bias=False)
    targets = torch.randint(0, 2, (512, 1)).float()
    return Case("MLP, batch 512", model, torch.randn(512, 48), targets, 5 if quick else 60, 20)


def residual(quick: bool, norm: Literal["batch", "none"] = "batch") -> Case:
    """ResNet20 on 32 images of 32 x 32."""
    model = resnet(20, norm=norm)
    targets = nn.functional.one_hot(torch.randint(0, 10, (32,)), 10).float()
    name = f"ResNet20, norm {norm}, batch 32"
    return Case(name, model, torch.randn(32, 3, 32, 32), targets, 3 if quick else 20, 1 if quick else 2)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance, averaged over samples."""
    return 0.5 * (outputs - targets).pow(2).sum(1).mean()


def plain_step(case: Case, loss: Function = squared_error) -> Callable[[], tuple[Tensor, ...]]:
    """Forward, loss, gradients."""
    parameters = list(case.model.parameters())

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(case.model(case.inputs), case.targets), parameters)

    return step


def veiled_round(case: Case, session: VeilSession) -> Callable[[], object]:
    """Return a round of the server and one client, with new noise each time."""

    def run() -> object:
        perturbation = session.perturb(case.model)
        update = fedveil.client_step(case.model, perturbation.broadcast, case.inputs, case.targets)
        result = perturbation.recover([update])
        perturbation.release(reuse=True)
        return result

    return run


def naive_round(model: nn.Sequential, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The paper's Sec. 4 for m = 1 as one would write it, a layer at a time; no biases, ReLU between layers.

    Factors have the range of `fedveil.Veil`; there is no permutation and no anchor.
    """
    veiled = copy.deepcopy(model)
    layers = [module for module in veiled if isinstance(module, nn.Linear)]
    outputs, dtype = layers[-1].out_features, inputs.dtype
    gamma = float(torch.empty(()).uniform_(0.5, 2.0))
    direction = torch.empty(outputs, dtype=dtype).uniform_(0.5, 2.0)
    before, ratios = torch.ones(layers[0].in_features, dtype=dtype), []
    with torch.no_grad():
        for layer in layers:
            r = torch.exp2(torch.empty(layer.out_features, dtype=dtype).uniform_(-2.0, 2.0))
            r = torch.ones_like(r) if layer is layers[-1] else r
            ratios.append(r.unsqueeze(1) / before)
            layer.weight.mul_(ratios[-1])
            before = r
        layers[-1].weight.add_((gamma * direction).unsqueeze(1))
    hidden = veiled[:-1](inputs)
    y, alpha = layers[-1](hidden), hidden.sum(1, keepdim=True)
    weights, samples = [layer.weight for layer in layers], len(inputs)
    delta, a = (y - targets).detach() / samples, alpha.detach() / samples
    cotangent = [a * direction, (delta @ direction).unsqueeze(1)]
    G = torch.autograd.grad(y, weights, delta, retain_graph=True)
    sigma = torch.autograd.grad([y, alpha], weights, cotangent, retain_graph=True)
    beta = torch.autograd.grad(alpha, weights, a, materialize_grads=True)
    v = float((gamma * direction).square().sum())
    return [R * (g - gamma * s + v * b) for R, g, s, b in zip(ratios, G, sigma, beta, strict=True)]


def check_naive(model: nn.Sequential, inputs: Tensor, targets: Tensor) -> None:
    """The naive round must do the work it is timed for: equal plain autograd in float64."""
    twin = Case("", copy.deepcopy(model).double(), inputs.double(), targets.double(), 0, 0)
    naive = naive_round(twin.model, twin.inputs, twin.targets)  # type: ignore[arg-type]
    for found, true in zip(naive, plain_step(twin)(), strict=True):
        assert torch.allclose(found, true, rtol=0, atol=1e-9 * float(true.norm()))


def against_ideal(
    case: Case, sent: Mapping[str, fedveil.Broadcast], beside: Mapping[str, Callable[[], object]] | None = None
) -> tuple[Timings, dict[str, Summary]]:
    """client_step for each broadcast over F + passes x B; other work may be timed beside it."""
    model, inputs, targets = case.model, case.inputs, case.targets
    parameters, outputs = list(model.parameters()), model(inputs)
    cotangent = torch.randn_like(outputs)
    work: dict[str, Callable[[], object]] = {
        "forward": lambda: model(inputs),
        "backward": lambda: torch.autograd.grad(outputs, parameters, cotangent, retain_graph=True),
        **(beside or {}),
    }
    for name, broadcast in sent.items():
        work[name] = partial(fedveil.client_step, model, broadcast, inputs, targets)
    timings = interleave(work, case.repetitions, case.calls)
    F, B = timings.seconds["forward"], timings.seconds["backward"]
    found = {}
    for name, broadcast in sent.items():
        ideal = [f + passes_of(broadcast) * b for f, b in zip(F, B, strict=True)]
        pair = {"ideal": ideal, "client": timings.seconds[name]}
        found[name] = compare(replace(timings, seconds=pair), "ideal")["client"]
    return timings, found


def passes_of(broadcast: fedveil.Broadcast) -> int:
    """How many backward passes a broadcast asks for."""
    assert broadcast.head is not None
    return len(broadcast.head.candidates) or broadcast.head.groups + 2


def client_against_ideal(case: Case, groups: Sequence[int], bound: float) -> list[Row]:
    """client_step over F + (m + 2) B, for each m."""
    plan = fedveil.analyse(case.model, case.inputs)
    sent = {f"m={m}": fedveil.Veil(m).perturb(case.model, plan).broadcast for m in groups}
    timings, found = against_ideal(case, sent)
    return [Row(f"client_step / ideal, {case.name}, {name}", found[name], bound, timings.kept) for name in sent]


def round_against_plain(case: Case, bound: float | None) -> list[Row]:
    """A whole round over a plain step; for a Sequential also the naive round."""
    session = fedveil.Veil().start(fedveil.analyse(case.model, case.inputs))
    work: dict[str, Callable[[], object]] = {"plain": plain_step(case), "round": veiled_round(case, session)}
    if isinstance(case.model, nn.Sequential):
        check_naive(case.model, case.inputs, case.targets)
        work["naive round"] = partial(naive_round, case.model, case.inputs, case.targets)
    timings = interleave(work, case.repetitions, case.calls)
    found = compare(timings, "plain")
    bounds = {"round": bound, "naive round": None}
    return [
        Row(f"{name} / plain step, {case.name}, m=1", found[name], bounds[name], timings.kept)
        for name in bounds
        if name in work
    ]


def with_classes(case: Case) -> tuple[Case, str, Function]:
    """The case with targets for cross-entropy, the loss's name, and torch's code for it; binary for one output."""
    if case.targets.shape[1] == 1:
        return case, "binary_cross_entropy", F.binary_cross_entropy_with_logits
    return replace(case, targets=case.targets.argmax(1)), "cross_entropy", F.cross_entropy


def cross_entropy(case: Case, ideal_bound: float | None, round_bound: float) -> list[Row]:
    """Numbers of decoys in one run: client_step over its ideal, and a whole round over a plain step.

    `ideal_bound` is for any number of decoys, `round_bound` for two.
    """
    case, loss, function = with_classes(case)
    plan = fedveil.analyse(case.model, case.inputs)
    sessions = {f"q={decoys + 1}": fedveil.Veil(decoys=decoys).start(plan, loss) for decoys in DECOYS}
    sent = {name: session.perturb(case.model).broadcast for name, session in sessions.items()}
    beside: dict[str, Callable[[], object]] = {"plain": plain_step(case, function)}
    beside |= {f"round, {name}": veiled_round(case, session) for name, session in sessions.items()}
    timings, found = against_ideal(case, sent, beside)
    over = compare(timings, "plain")
    what = f"{case.name}, {loss.replace('_', ' ')}"
    steps = [Row(f"client_step / ideal, {what}, {name}", found[name], ideal_bound, timings.kept) for name in sessions]
    return steps + [
        Row(
            f"round / plain step, {what}, {name}",
            over[f"round, {name}"],
            round_bound if name == "q=3" else None,
            timings.kept,
        )
        for name in sessions
    ]


def show(rows: Sequence[Row]) -> bool:
    """Print the table; returns whether every bound is kept."""
    lines = []
    for row in rows:
        low, middle, high = row.found.ratio
        ratio = f"x{middle:.2f} [{low:.2f}, {high:.2f}]"
        lines.append([row.what, f"{1e3 * row.found.seconds:.2f}", ratio, *verdict(middle, row.bound), row.kept])
    print(table(["what", "ms", "ratio [quartiles]", "bound", "", "repetitions"], lines))
    return all(line[4] != "OVER" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description="What a veil costs.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--only", choices=("squared-error", "cross-entropy"), help="one of the tables")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    quick, only, kept = arguments.quick, arguments.only, []
    if only in (None, "squared-error"):
        torch.manual_seed(0)
        rows = [
            *client_against_ideal(residual(quick), [1, 10], 1.15),
            *client_against_ideal(perceptron(quick), [1], 1.6),
            *round_against_plain(perceptron(quick), 3.0),
            *round_against_plain(residual(quick), 2.4),
            *round_against_plain(residual(quick, "none"), None),
        ]
        kept.append(show(rows))
        print("round / plain step of the paper's public code: x6.3 (this MLP), x3.2 (ResNet20, no norm)\n", flush=True)
    if only in (None, "cross-entropy"):
        torch.manual_seed(0)
        large = replace(residual(quick), calls=1)  # there is so much to time that a repetition is long enough
        kept.append(show([*cross_entropy(large, 1.15, 2.4), *cross_entropy(perceptron(quick), None, 3.0)]))
        print("q candidates: the true offset and q - 1 decoys")
    print(machine())
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
