"""Users' metrics: functions get (targets, predictions), objects get (outputs, targets), and mistakes are named."""

import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch.nn import functional as F

from fedveil.errors import BadArgument
from fedveil.federation import Probabilities
from fedveil.federation.user_metrics import check_metrics, compute_metrics
from fedveil.scheme import find_loss

LOSS = find_loss("cross_entropy")


def draw(classes=3, size=40, *positions):
    return torch.randn(size, classes, *positions), torch.randint(0, classes, (size, *positions))


class Streaming:
    """A metric in the manner of torchmetrics: the fraction of correct positions, with classes on axis 1."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.hits = self.count = 0

    def update(self, outputs, targets):
        predicted = outputs.argmax(1) if outputs.dim() > targets.dim() else (outputs > 0).long()
        assert predicted.shape == targets.shape
        self.hits += int((predicted == targets).sum())
        self.count += targets.numel()

    def compute(self):
        return torch.tensor(self.hits / self.count)


def compute(metric, outputs, targets, loss=LOSS, axis=None, name="own"):
    check_metrics({name: metric})
    return compute_metrics({name: metric}, outputs, targets, loss, axis)[name]


def test_functions_get_targets_then_predicted_classes_as_in_scikit_learn():
    outputs, targets = draw()
    precision = lambda targets, predictions: sklearn_metrics.precision_score(targets, predictions, average="macro")  # noqa: E731
    expected = sklearn_metrics.precision_score(targets, outputs.argmax(1), average="macro")
    assert compute(precision, outputs, targets) == pytest.approx(expected, abs=1e-12)
    assert expected != sklearn_metrics.precision_score(outputs.argmax(1), targets, average="macro")  # the order matters
    binary = compute(sklearn_metrics.recall_score, outputs[:, :1], targets > 0, find_loss("binary_cross_entropy"))
    assert binary == sklearn_metrics.recall_score(targets > 0, outputs[:, 0] > 0)
    quantities = torch.randn(40), find_loss("squared_error")
    found = compute(sklearn_metrics.max_error, outputs[:, :1], *quantities)
    assert found == pytest.approx(float((outputs[:, 0] - quantities[0]).abs().max()))


def test_objects_get_outputs_then_targets_as_in_torchmetrics():
    outputs, targets = draw()
    accuracy = float((outputs.argmax(1) == targets).double().mean())
    metric = Streaming()
    assert [compute(metric, outputs, targets) for _ in range(2)] == pytest.approx([accuracy] * 2)  # reset in between
    pixels, labels = draw(3, 4, 5, 6)
    expected = float((pixels.argmax(1) == labels).double().mean())
    assert compute(metric, pixels, labels) == pytest.approx(expected)
    assert compute(metric, pixels.movedim(1, -1), labels, axis=-1) == pytest.approx(expected)
    single = compute(metric, outputs[:, :1], (targets > 0).long(), find_loss("binary_cross_entropy"))
    assert single == pytest.approx(float(((outputs[:, 0] > 0) == (targets > 0)).double().mean()))


def test_torchmetrics_own_objects_agree():
    import torchmetrics

    outputs, targets = draw()
    found = compute(torchmetrics.F1Score("multiclass", num_classes=3, average="macro"), outputs, targets)
    assert found == pytest.approx(sklearn_metrics.f1_score(targets, outputs.argmax(1), average="macro"), abs=1e-6)


def test_probabilities_are_those_of_class_1_or_a_row_per_record():
    outputs, targets = draw()
    several = compute(Probabilities(sklearn_metrics.log_loss), outputs, targets)
    assert several == pytest.approx(float(F.cross_entropy(outputs, targets)), abs=1e-6)
    two, halves = outputs[:, :2], targets % 2
    auc = sklearn_metrics.roc_auc_score(halves, two.softmax(1)[:, 1])
    assert compute(Probabilities(sklearn_metrics.roc_auc_score), two, halves) == pytest.approx(auc, abs=1e-12)
    one = compute(Probabilities(sklearn_metrics.log_loss), two[:, :1], halves, find_loss("binary_cross_entropy"))
    expected = F.binary_cross_entropy_with_logits(two[:, 0], halves.float())
    assert one == pytest.approx(float(expected), abs=1e-6)
    with pytest.raises(BadArgument, match="outputs trained with squared_error are not probabilities"):
        compute(Probabilities(sklearn_metrics.log_loss), outputs, targets, find_loss("squared_error"))


def reversed_order(preds, target):
    return 0.0


@pytest.mark.parametrize(
    ("name", "metric", "why"),
    [
        (
            "f1",
            sklearn_metrics.f1_score,
            r"metrics\['f1'\]: f1_score failed when called as f\(targets, predictions\).*multiclass",
        ),
        (
            "f1",
            reversed_order,
            r"(?s)parameters are \(preds, target\).*lambda targets, predictions: reversed_order\(pred",
        ),
        ("auc", sklearn_metrics.roc_auc_score, r"(?s)not scores.*Probabilities\(roc_auc_score\)"),
        ("nll", sklearn_metrics.log_loss, r"(?s)not scores.*Probabilities\(log_loss\)"),
        (
            "each",
            sklearn_metrics.confusion_matrix,
            r"(?s)metrics\['each'\]: the metric must return one number, got ndarray.*average=\"macro\"",
        ),
        ("own", Streaming, r"(?s)Streaming is a class.*pass an instance: Streaming\(\.\.\.\)"),
        ("own", 3, r"(?s)got int.*update, compute and reset"),
        ("loss", len, "this name is reserved"),
        ("validation_x", len, "this name is reserved"),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused_by_its_name(name, metric, why):
    outputs, targets = draw()
    with pytest.raises(BadArgument, match=why):
        compute(metric, outputs, targets, name=name)


def test_metrics_are_a_dict():
    with pytest.raises(BadArgument, match=r"(?s)metrics must be a dict, got list.*metrics=\{"):
        check_metrics([len])
