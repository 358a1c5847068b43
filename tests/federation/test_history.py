"""The curves of a history: a name that no record has is refused with those that there are."""

import pytest
import torch

from fedveil import Federation
from fedveil.federation.history import History, RoundRecord
from fedveil.models import mlp

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
PAIR = X, (X[:, 0] > 0).long()


def fitted(**options):
    return Federation(mlp(4, 2, hidden=8), [PAIR], "plain").fit(2, **options)


def test_a_misspelt_metric_is_refused_with_those_that_there_are():
    history = fitted(test=PAIR)
    assert len(history.curve("accuracy")) == 2
    with pytest.raises(KeyError, match=r"acuracy: no record has it; known: accuracy, auc, .*error.*loss"):
        history.curve("acuracy")


def test_a_metric_without_test_data_is_refused_with_the_reason():
    history = fitted()
    assert len(history.curve("error")) == len(history.records)
    with pytest.raises(KeyError, match=r"accuracy: .*no evaluation: pass test= to fit"):
        history.curve("accuracy")


def test_a_metric_that_some_records_have_is_a_shorter_curve():
    history = History([RoundRecord(1, 0.5, 0.0, 0.1, 1.0), RoundRecord(2, 1.0, 0.0, 0.1, 2.0, True, {"accuracy": 0.5})])
    assert history.curve("accuracy") == [(2, 0.5)]
    with pytest.raises(KeyError, match="auc"):
        history.curve("auc")
    assert History().curve("auc") == []
