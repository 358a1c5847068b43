"""What a participant's model is worth: how far it agrees with the server's, and how well it predicts."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.attacks.scores import Estimate, Scores, auc, average, proportion
from fedveil.data import Data
from fedveil.federation.evaluate import predict

Figures = dict[str, Any]


def decided(outputs: Tensor) -> Tensor:
    """The answer that outputs stand for: the largest, or, of one output, whether it is above one half."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0.5).long()


def share(hits: int, trials: int) -> Figures:
    """A share with the interval of Clopper and Pearson."""
    return dataclasses.asdict(proportion(hits, trials))


def view_figures(view: nn.Module, model: nn.Module, data: Data) -> Figures:
    """Agreement with the true model and accuracy, on held-out records; of one output also the AUC.

    A model with one output leaks its ranking whatever is added to it, so there the AUC is what counts.
    """
    inputs, targets = data.test.tensor, data.test.targets
    device = next(model.parameters()).device
    seen, true = (predict(net, inputs.to(device)).cpu() for net in (view, model))
    finite = torch.nan_to_num(seen)
    same = decided(finite) == decided(true)
    found: Figures = {"agreement": share(int(same.sum()), len(same))}
    labels = targets if not targets.is_floating_point() else _two_classes(targets)
    if labels is not None:
        found["accuracy"] = share(int((decided(finite) == labels).sum()), len(labels))
    if labels is not None and seen.shape[1] == 1:
        scores = finite[:, 0].double().numpy()
        found["ranking"] = ranking(scores[labels.numpy() == 1], scores[labels.numpy() == 0])
    return found


def ranking(positive: Scores, negative: Scores) -> Figures:
    """AUC of the better direction: whoever knows a few answers knows which way round a ranking is."""
    found = auc(positive, negative)
    return dataclasses.asdict(found if found.value >= 0.5 else Estimate(1 - found.value, 1 - found.high, 1 - found.low))


def _two_classes(targets: Tensor) -> Tensor | None:
    """Targets of 0 and 1 in one column as classes."""
    if targets.shape[1] != 1 or not ((targets == 0) | (targets == 1)).all():
        return None
    return targets[:, 0].long()


def mean_interval(values: list[float]) -> Figures:
    """Mean of repeated measurements with Student's interval."""
    return dataclasses.asdict(average(values))


def averaged(looks: Sequence[Figures]) -> Figures:
    """The same figures of several broadcasts as one: means, their intervals joined with those of single broadcasts.

    A half width is the root of Student's, over broadcasts, squared and the mean single one, over records, squared.
    """
    if len(looks) == 1:
        return looks[0]
    first = looks[0]
    if set(first) != {"value", "low", "high"}:
        nested = {name: [look[name] for look in looks] for name in first}
        return {name: averaged(parts) if isinstance(parts[0], dict) else parts[0] for name, parts in nested.items()}
    over = mean_interval([look["value"] for look in looks])
    single = sum(look["high"] - look["low"] for look in looks) / (2 * len(looks))
    reach = math.hypot(over["high"] - over["value"], single)
    low, high = max(0.0, over["value"] - reach), min(1.0, over["value"] + reach)
    return dataclasses.asdict(Estimate(over["value"], low, high))
