"""Labels that a gradient reveals."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.leaked_gradients import Leak
from fedveil.errors import BadArgument
from fedveil.graph.inputs import calls_of


def single_label(leak: Leak) -> int:
    """Return the label of one record (iDLG, arXiv 2001.02610).

    It is the class whose row of the head's gradient has the least sum. Row c is (p_c - [c = label]) h for features h.
    If no feature is negative, only the label's row is. The bias's gradient, if there is one, is p_c - [c = label]
    itself, whatever the features.
    """
    return int(_head(leak)[1].argmin())


def batch_labels(leak: Leak, records: int, own: Tensor) -> list[int]:
    """Return the labels of several records, sorted; a label may occur more than once.

    For a loss with the gradient s(y) - target (cross-entropy, squared error), the bias's gradient for B records is
    mean s(y)_c - n_c / B with n_c records of class c. The attacker estimates the mean with its own records and assigns
    labels one by one, each to the class with the most left of B (mean s(y)_c - gradient_c). Without a bias, row sums
    are divided by the mean sum of its own records' features.

    Source: the counting idea of LLG (Wainakh et al. 2022, arXiv 2105.09369), with own records in place of a fit.
    """
    head, sums, has_bias = _head(leak)
    with torch.no_grad(), calls_of([head]) as calls:
        outputs = leak.model(own)
    some = F.one_hot(outputs.new_zeros(len(outputs), dtype=torch.int64), outputs.shape[-1]).to(outputs)
    slope = (leak.loss.gradient(outputs, some) + some).mean(0)
    size = 1.0 if has_bias else float(calls[0].entered.flatten(1).sum(1).mean())
    left = records * (slope - sums / (size or 1.0))
    labels = []
    for _ in range(records):
        labels.append(int(left.argmax()))
        left[labels[-1]] -= 1
    return sorted(labels)


def _head(leak: Leak) -> tuple[nn.Linear, Tensor, bool]:
    """Return the last Linear, the gradient of its bias (or the sum of each class's row), and whether it has a bias."""
    found = [(path, module) for path, module in leak.model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise BadArgument("labels", "the model has no Linear whose gradient would reveal labels", "use --method dlg")
    path, head = found[-1]
    weight, bias = (leak.gradients.get(f"{path}.{name}" if path else name) for name in ("weight", "bias"))
    if bias is not None:
        return head, bias, True
    assert weight is not None
    return head, weight.sum(1), False
