"""The metrics of an evaluation are those of scikit-learn."""

import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn

from fedveil.federation.evaluate import find_classes, measure, metric_names, metrics, score_classes
from fedveil.scheme import find_loss


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_of_classes_are_scikit_learns(classes):
    outputs, targets = draw(60, classes), torch.randint(0, classes, (60,)) // 2 * 2  # some classes have no records
    outputs[:, 0] -= 9  # class 0 is never predicted
    found, predicted = measure(outputs, targets), outputs.argmax(1)
    assert found["accuracy"] == sklearn_metrics.accuracy_score(targets, predicted)
    present = sorted(set(targets.tolist()))
    recall = sklearn_metrics.recall_score(targets, predicted, average="macro", labels=present, zero_division=0)
    assert found["balanced_accuracy"] == pytest.approx(recall, abs=1e-12)
    f1 = sklearn_metrics.f1_score(targets, predicted, average="macro", zero_division=0)
    assert found["f1"] == pytest.approx(f1, abs=1e-12)
    scores = score_classes(find_classes(outputs, targets, None, None))
    labels = range(classes)
    wanted = sklearn_metrics.precision_recall_fscore_support(targets, predicted, labels=labels, zero_division=0)
    for own, other in zip((scores.precision, scores.recall, scores.f1, scores.records), wanted, strict=True):
        assert own.tolist() == pytest.approx(other, abs=1e-12)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))])
def test_one_output_has_two_classes(loss):
    outputs, targets = draw(50, 1), torch.randint(0, 2, (50,)).double()
    found = measure(outputs, targets, find_loss(loss))
    predicted = (outputs[:, 0] > 0).long()
    assert found["accuracy"] == sklearn_metrics.accuracy_score(targets, predicted)
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(targets, outputs[:, 0]), abs=1e-12)
    balanced = sklearn_metrics.balanced_accuracy_score(targets, predicted)
    assert found["balanced_accuracy"] == pytest.approx(balanced, abs=1e-12)


@pytest.mark.parametrize("shape", [(40, 1), (40, 3), (40,)])
def test_metrics_of_quantities_are_scikit_learns(shape):
    outputs, targets = draw(40, *shape[1:] or (1,)), draw(*shape)
    found, shown = measure(outputs, targets), outputs.reshape(shape)
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(targets, shown), abs=1e-12)
    r2 = sklearn_metrics.r2_score(targets, shown, multioutput="variance_weighted")
    assert found["r2"] == pytest.approx(r2, abs=1e-12)
    assert "r2" not in measure(outputs, torch.ones(shape, dtype=torch.float64))
    assert metric_names(outputs, torch.ones(shape).double(), find_loss("squared_error")) == {"mse", "mae", "r2"}


def test_positions_without_a_label_do_not_count_and_several_binary_targets_have_only_an_accuracy():
    outputs, labels = draw(4, 6, 3), torch.randint(0, 3, (4, 6))
    labels[:, 4:] = -100
    padded = measure(outputs, labels, find_loss("token_cross_entropy"))
    assert padded == pytest.approx(measure(outputs[:, :4], labels[:, :4], find_loss("token_cross_entropy")), abs=1e-12)
    assert measure(outputs, labels)["f1"] == pytest.approx(padded["f1"], abs=1e-12)
    several = draw(8, 4), torch.randint(0, 2, (8, 4))
    assert set(measure(*several, find_loss("binary_cross_entropy"))) == {"accuracy", "loss"}
    assert set(metrics(*several, find_loss("binary_cross_entropy"))) == {"accuracy", "loss"}
