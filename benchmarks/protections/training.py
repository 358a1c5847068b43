"""Accuracy, the copy of the model that clients get, and the cost of a round. Figures of a cell are JSON values."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cells import Figures
from benchmarks.protections.tasks import EPSILONS, NONE, PROTECTIONS, TASKS, Protection, make_federation, records
from benchmarks.timing import quartiles
from fedveil import Federation
from fedveil.defences.registry import find_codec
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.protocol import write
from fedveil.federation.secure_round import SecureRound
from fedveil.scheme.losses import find_loss
from fedveil.studies.federations import observe_all
from fedveil.wire import to_bytes

OBSERVATIONS, BROADCASTS = 4, 6  # of a client per run, and the broadcasts that its attackers collect in each
REPETITIONS, STEPS, WARM_UP = 12, 4, 2  # repetitions of the timing, and rounds in each


def metric(name: str, outputs: Tensor) -> float:
    """Return the task's metric for outputs on the test records."""
    task = TASKS[name]
    return metrics(outputs, records(name).test.targets, find_loss(task.loss))[task.metric]


def measure_accuracy(name: str, protection: Protection, seed: int) -> Figures:
    """Train on all training records; return the metric of the last model on the test records."""
    federation = make_federation(name, protection, seed)
    federation.fit(rounds=TASKS[name].rounds)
    return {"value": metric(name, predict(federation.model, records(name).test.tensor))}


def measure_copy(name: str, protection: Protection, seed: int) -> Figures:
    """Return how well a client's copy agrees with the server's model on test records, and the metric of the copy.

    By attacker: as published (the model as received), and those that know the veil. Means over observations in the last
    rounds of a run.
    """
    federation, test = make_federation(name, protection, seed), records(name).test.tensor
    federation.fit(rounds=TASKS[name].rounds - OBSERVATIONS * BROADCASTS)
    found: dict[str, list[tuple[float, float]]] = {}
    constant, server = [], []
    for _ in range(OBSERVATIONS):
        views, _ = observe_all(federation, "veil")
        true = predict(federation.model, test)
        constant.append(float(torch.unique(answers(true), return_counts=True)[1].max()) / len(test))
        server.append(metric(name, true))
        for attacker, observed in views.items():
            outputs = torch.nan_to_num(predict(observed.model, test))
            agreement = float((answers(outputs) == answers(true)).double().mean())
            found.setdefault(attacker, []).append((agreement, metric(name, outputs)))
    means = {
        attacker: [statistics.fmean(column) for column in zip(*own, strict=True)] for attacker, own in found.items()
    }
    return {
        "agreement": {attacker: own[0] for attacker, own in means.items()},
        "metric": {attacker: own[1] for attacker, own in means.items()},
        "constant": statistics.fmean(constant),
        "server": statistics.fmean(server),
    }


def answers(outputs: Tensor) -> Tensor:
    """Return the class of each record; a single output is a logit."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()


def measure_cost(name: str) -> Figures:
    """Return milliseconds of CPU time per round (five clients and the server), over plain, and bytes per client.

    Every repetition times each protection once, in rotated order; ratios are taken within a repetition, and their
    median and quartiles are returned. The epsilon of every round is computed before: a run computes it some hundred
    times, not in every round.
    """
    for epsilon in EPSILONS[1:]:
        federation = make_federation(name, Protection(epsilon=epsilon), 0)
        for _ in range(2 + STEPS * (WARM_UP + REPETITIONS)):
            federation.step()
    federations = {own.label: make_federation(name, own, 0, fuse=False) for own in PROTECTIONS}
    sizes = {label: message_sizes(federation) for label, federation in federations.items()}
    times: dict[str, list[float]] = {label: [] for label in federations}
    for number in range(WARM_UP + REPETITIONS):
        first = number % len(federations)
        for label in [*federations][first:] + [*federations][:first]:
            began = time.process_time()
            for _ in range(STEPS):
                federations[label].step()
            if number >= WARM_UP:
                times[label].append(1e3 * (time.process_time() - began) / STEPS)
    found: Figures = {}
    for label, own in times.items():
        low, middle, high = quartiles([mine / base for mine, base in zip(own, times[NONE.label], strict=True)])
        down, up = sizes[label]
        found[label] = {
            "ms": statistics.median(own),
            "ratio": [middle, low, high],
            "down": down,
            "up": up,
        }
    return found


def message_sizes(federation: Federation) -> tuple[int, int]:
    """Return the bytes that a client receives and sends in one round, on average, without the engine's envelope."""
    engine, codec, clients = federation.clients, find_codec(federation.defence), len(federation.shards.sizes)
    ask_masked, run_step = engine.ask_masked, engine.run_step
    sizes = {"down": 0, "up": 0}

    def count_clear(broadcast: Any, updates: Sequence[Any]) -> None:
        sizes["down"] += clients * len(to_bytes("request", *codec.encode_broadcast(broadcast)))
        sizes["up"] += sum(len(to_bytes("answer", *codec.encode_update(update))) for update in updates)

    def count_masked(number, defence_round, members, terms, channels):  # type: ignore[no-untyped-def]
        values, tensors = codec.encode_broadcast(defence_round.broadcast)
        sizes["down"] += clients * len(to_bytes("request", {**values, "secure": terms.values()}, tensors))
        digest, uploads = ask_masked(number, defence_round, members, terms, channels)
        return digest, count_replies(uploads)

    def count_step(step, own, channels, timeout=None):  # type: ignore[no-untyped-def]
        sizes["down"] += sum(len(write(step)) + len(extra) for extra in own.values())
        return count_replies(run_step(step, own, channels, timeout))

    def count_replies(replies: Iterable[Any]) -> Iterator[Any]:
        for reply in replies:
            sizes["up"] += len(reply[1])
            yield reply

    federation.step()  # the first round also exchanges keys
    if isinstance(federation.rounds, SecureRound):
        engine.ask_masked, engine.run_step = count_masked, count_step  # type: ignore[method-assign]
    federation.step(count_clear)
    engine.ask_masked, engine.run_step = ask_masked, run_step  # type: ignore[method-assign]
    return round(sizes["down"] / clients), round(sizes["up"] / clients)
