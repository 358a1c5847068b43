"""How often a client that has one broadcast, and nothing else, picks the true offset from among the decoys.

    python -m benchmarks.picks [--quick] [--secrets 1000] [--models 10]

Every candidate implies a head. An attacker that knows what heads look like picks the most plausible one. Digits, MLP
64-64-64-10 (narrow: 64-64-8-10), float32, ten models of each kind, new secrets and real broadcasts in every row.
The best heuristic is chosen on the data that it is measured on. "Elsewhere" chooses it on half of the models and
measures it on the other half, and the reverse; so does the network. Two clients do have records. The last columns say
how often a model with a wrong head predicts the same as the true one.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import fedveil
from benchmarks.picks_rules import (
    Places,
    Reals,
    Seen,
    Values,
    grid,
    heuristics,
    look,
    off_the_line,
    pick,
    trailing_zeros,
)
from benchmarks.timing import table
from fedveil.data import Data, load, one_tensor
from fedveil.graph.plan import Plan
from fedveil.scheme.broadcast import Broadcast
from fedveil.scheme.noise import Entropy

GROUPS, CANDIDATES = (1, 10), (2, 3, 4)
STEPS, BATCH = 300, 64
OWN_INPUTS, OWN_LABELS = 100, 20  # records of a client that has some
WITH_RECORDS, AGREEMENTS = 200, 100  # secrets per row for which records are used, and predictions compared
EPOCHS, UNITS = 120, 16  # of the network that attacks
CHANCES = 200  # random guesses by which the best of all heuristics is compared

Optimiser = Callable[..., torch.optim.Optimizer]


# Models


@dataclass(frozen=True)
class Kind:
    """How the models of a row came about; not trained if there is no optimiser."""

    name: str
    optimiser: Optimiser | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    width: int = 64
    zero_bias: bool = False


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Half the squared distance to the labels' one-hot vectors."""
    return 0.5 * (outputs - F.one_hot(labels, outputs.shape[1])).square().sum(1).mean()


ADAM: Optimiser = partial(torch.optim.Adam, lr=1e-3, fused=True)
SGD: Optimiser = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
KINDS = (
    Kind("new"),
    Kind("cross-entropy, Adam", ADAM),
    Kind("cross-entropy, SGD", SGD),
    Kind("squared error, Adam", ADAM, squared_error),
    Kind("narrow, Adam", ADAM, width=8),
    Kind("new, zero bias", zero_bias=True),
)


def make(kind: Kind, seed: int, data: Data) -> nn.Sequential:
    """A model of a kind, its own start and batches."""
    inputs, labels = one_tensor("picks", data.train.inputs), data.train.targets
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        last = nn.Linear(kind.width, 10)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, kind.width), nn.ReLU(), last)
        if kind.zero_bias:
            nn.init.zeros_(last.bias)
        if kind.optimiser is None:
            return model
        optimiser = kind.optimiser(model.parameters())
        for _ in range(STEPS):
            batch = torch.randint(len(inputs), (BATCH,))
            optimiser.zero_grad()
            torch.autograd.backward(kind.loss(model(inputs[batch]), labels[batch]))
            optimiser.step()
    return model


@dataclass(frozen=True)
class Case:
    """Models of a kind, and what they share."""

    kind: Kind
    models: list[nn.Sequential]
    plan: Plan
    data: Data


def prepare(kind: Kind, count: int, data: Data) -> Case:
    """Make the models of a kind."""
    models = [make(kind, seed, data) for seed in range(count)]
    return Case(kind, models, fedveil.analyse(models[0], one_tensor("picks", data.train.inputs)[:2]), data)


# A network that learns how to pick


def features(values: Values) -> Reals:
    """Of each candidate against the others, and the size of each value: secrets x candidates x features."""
    plain = np.clip(np.stack(list(values.values()), 2), -1e6, 1e6)
    logs = np.log(np.abs(plain) + 1e-12)
    relative = [part - part.mean(1, keepdims=True) for part in (plain, logs)]
    return np.concatenate([*relative, logs], 2)


def learn(inputs: Reals, places: Places, train: NDArray[np.bool_]) -> Reals:
    """Values for the secrets that are not in `train`, smallest for the likeliest candidate."""
    centre, spread = inputs[train].mean((0, 1)), inputs[train].std((0, 1)) + 1e-12
    scaled = torch.from_numpy(np.clip((inputs - centre) / spread, -5, 5)).float()
    known, truth = scaled[torch.from_numpy(train)], torch.from_numpy(places[train])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(scaled.shape[2], UNITS), nn.Tanh(), nn.Linear(UNITS, 1))
        optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        for _ in range(EPOCHS):
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(network(known)[..., 0], truth))
            optimiser.step()
    with torch.no_grad():
        found: Reals = -network(scaled[torch.from_numpy(~train)])[..., 0].double().numpy()
    return found


def network_picks(values: Values, places: Places, owners: Places, random: np.random.Generator) -> Places:
    """What a network picks that learned from the other half of the models."""
    inputs, second = features(values), owners >= (owners.max() + 1) / 2
    found = np.zeros_like(places)
    for train in (second, ~second):
        found[~train] = pick(learn(inputs, places, train), random)
    return found


# Clients with records


class Trial(NamedTuple):
    """What records reveal about one secret.

    Attributes:
        decoys_agree: share of test records on which a decoy's model predicts the same as the true one.
        base_agrees: the same for the base, with no candidate subtracted.
        confident: whether the model that is most confident on a client's inputs is the true one.
        labelled: whether the model with the lowest loss on a client's labels is.
    """

    decoys_agree: float
    base_agrees: float
    confident: bool
    labelled: bool


def compute_outputs(model: nn.Sequential, broadcast: Broadcast, inputs: Tensor) -> Tensor:
    """Of the base, then of each candidate's model."""
    head = broadcast.head
    assert head is not None
    assert head.bias is not None
    sent = dict(broadcast.parameters)
    weight, bias = sent.pop(head.weight), sent.pop(head.bias)
    hidden = torch.func.functional_call(model[:-1], sent, inputs)
    base = F.linear(hidden, weight, bias)
    alpha = hidden.sum(1, keepdim=True) + float(head.noisy_bias)
    return torch.cat([base[None], base - alpha * head.noise(base)[:, None]])


def try_records(
    model: nn.Sequential, broadcast: Broadcast, place: int, data: Data, random: np.random.Generator
) -> Trial:
    """One secret, with records that a client might have."""
    inputs, labels = one_tensor("picks", data.test.inputs), data.test.targets
    with torch.no_grad():
        outputs = compute_outputs(model, broadcast, inputs).double()
    answers = outputs.argmax(2)
    agree = (answers == answers[1 + place]).double().mean(1).numpy()
    own = torch.from_numpy(random.permutation(len(inputs)))
    sure = outputs[1:, own[:OWN_INPUTS]].softmax(2).amax(2).mean(1)
    few = own[:OWN_LABELS]
    losses = -outputs[1:, few].log_softmax(2)[:, torch.arange(OWN_LABELS), labels[few]].mean(1)
    confident, labelled = (int(pick(values[None].numpy(), random)[0]) == place for values in (-sure, losses))
    return Trial(float(np.delete(agree[1:], place).mean()), float(agree[0]), confident, labelled)


# A row of the table


@dataclass(frozen=True)
class Row:
    """Pick rates of one kind of head, m and q.

    Attributes:
        rates: by attacker.
        best: the best heuristic's name.
        by_chance: what the best of all heuristics would reach if all of them guessed.
        scatter: half of a heuristic's 95 % interval, from how much its rates differ between models; mean of all.
    """

    kind: str
    groups: int
    candidates: int
    rates: dict[str, float]
    best: str
    by_chance: float
    scatter: float

    def cells(self) -> list[str]:
        """For the table."""
        rates = {name: f"{rate:.3f}" for name, rate in self.rates.items()}
        rates["best heuristic"] += f" {self.best}"
        return [self.kind, str(self.groups), str(self.candidates), f"{1 / self.candidates:.3f}", *rates.values()]


def send(
    models: Sequence[nn.Sequential], plan: Plan, groups: int, candidates: int, secrets: int, entropy: Entropy
) -> Iterator[tuple[nn.Sequential, Broadcast, int]]:
    """Broadcasts of the models in turn, and where the true candidate is."""
    for number in range(secrets):
        model = models[number % len(models)]
        veil = fedveil.Veil(groups, decoys=candidates - 1, entropy=entropy)
        perturbation = veil.perturb(model, plan, "cross_entropy")
        yield model, perturbation.broadcast, perturbation.recovery.coefficients.index(1.0)


def measure(case: Case, groups: int, candidates: int, secrets: int, seed: int) -> Row:
    """All attackers on new secrets."""
    random, entropy = np.random.default_rng(seed), Entropy.for_tests(seed)
    looks: list[tuple[Reals, ...]] = []
    true: list[int] = []
    trials: list[Trial] = []
    for model, broadcast, place in send(case.models, case.plan, groups, candidates, secrets, entropy):
        looks.append(look(broadcast))
        true.append(place)
        if len(trials) < WITH_RECORDS:
            trials.append(try_records(model, broadcast, place, case.data, random))
    seen, places = Seen(*(np.stack(parts) for parts in zip(*looks, strict=True))), np.array(true)
    values = heuristics(seen)
    signs = (("smallest", 1), ("largest", -1))
    picks = {f"{word} {name}": pick(sign * found, random) for name, found in values.items() for word, sign in signs}
    rates = {name: float((picked == places).mean()) for name, picked in picks.items()}
    best = max(rates, key=lambda name: rates[name])
    all_picks = np.stack(list(picks.values()))
    guesses = [(all_picks == random.integers(candidates, size=secrets)).mean(1).max() for _ in range(CHANCES)]
    owners = np.arange(secrets) % len(case.models)
    by_model = np.stack([(all_picks == places)[:, owners == owner].mean(1) for owner in range(len(case.models))])
    scatter = 1.96 * by_model.std(0, ddof=1).mean() / np.sqrt(len(by_model))

    def rate(picked: Places) -> float:
        return float((picked == places).mean())

    found = {
        "nearest to zero": rates["smallest distance from zero"],
        "smallest norm": max(rates["smallest norm, sent"], rates["smallest norm, canonical"]),
        "column sums": max(rates["smallest column sums, sent"], rates["largest column sums, sent"]),
        "rounding": rate(pick(grid(seen), random)),
        "digits": max(rate(pick(rule(seen), random)) for rule in (trailing_zeros, off_the_line)),
        "best heuristic": rates[best],
        "chosen elsewhere": chosen_elsewhere(by_model),
        "network": rate(network_picks(values, places, owners, random)),
        "own inputs": float(np.mean([trial.confident for trial in trials])),
        "own labels": float(np.mean([trial.labelled for trial in trials])),
        "decoy agrees": float(np.mean([trial.decoys_agree for trial in trials[:AGREEMENTS]])),
        "base agrees": float(np.mean([trial.base_agrees for trial in trials[:AGREEMENTS]])),
    }
    return Row(case.kind.name, groups, candidates, found, best, float(np.mean(guesses)), float(scatter))


def chosen_elsewhere(by_model: Reals) -> float:
    """The rate of the heuristic that is best on one half of the models on the other half; mean of both ways."""
    halves = [half.mean(0) for half in np.array_split(by_model, 2)]
    return float(np.mean([halves[1][halves[0].argmax()], halves[0][halves[1].argmax()]]))


def half_width(candidates: int, secrets: int) -> float:
    """Of a 95 % interval around the rate of guessing."""
    share = 1 / candidates
    return float(1.96 * np.sqrt(share * (1 - share) / secrets))


def foot(rows: Sequence[Row], secrets: int) -> str:
    """Notes on the table."""
    lines = []
    for candidates in sorted({row.candidates for row in rows}):
        same = [row for row in rows if row.candidates == candidates]
        chance, scatter = np.mean([row.by_chance for row in same]), np.mean([row.scatter for row in same])
        wide, narrow = half_width(candidates, min(secrets, WITH_RECORDS)), half_width(candidates, secrets)
        lines.append(
            f"q = {candidates}: 95 % within +-{narrow:.3f} of 1/q, own inputs and labels +-{wide:.3f}, by the scatter "
            f"between models +-{scatter:.3f}; the best of all heuristics, if all of them guessed: {chance:.3f}"
        )
    return "\n".join(
        [
            *lines,
            "smallest norm: as received or canonical, the better; column sums: smallest or largest, the better",
            "rounding: is the implied head on float32's grid; digits: the candidates' own last digits, the better of "
            "fewest trailing zeros and nearest to the line through the others",
            f"own inputs: most confident on {OWN_INPUTS} unlabelled records; own labels: lowest cross-entropy on "
            f"{OWN_LABELS}; agrees: share of test records with the true model's prediction",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; there is no bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picks", description="Picking the true candidate.")
    parser.add_argument("--quick", action="store_true", help="few models and secrets, q = 3 only")
    parser.add_argument("--secrets", type=int, help="per row (default 1000; quick 40)")
    parser.add_argument("--models", type=int, help="per kind (default 10; quick 2)")
    arguments = parser.parse_args(argv)
    secrets = arguments.secrets or (40 if arguments.quick else 1000)
    count = arguments.models or (2 if arguments.quick else 10)
    torch.set_num_threads(1)
    start = time.perf_counter()
    data, rows = load("digits"), list[Row]()
    for kind in KINDS:
        case = prepare(kind, count, data)
        for groups in GROUPS:
            for candidates in CANDIDATES[1:2] if arguments.quick else CANDIDATES:
                rows.append(measure(case, groups, candidates, secrets, len(rows)))
    print(table(["head", "m", "q", "1/q", *rows[0].rates], [row.cells() for row in rows]))
    print(foot(rows, secrets))
    print(f"{secrets} secrets per row, {count} models per kind, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
