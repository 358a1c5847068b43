"""The curves of a history: a name that no record has is refused with those that there are."""

import pytest

from fedveil.federation.history import History, RoundRecord

FIRST, SECOND = RoundRecord(1, 0.5, 0.0, 0.1, 1.0), RoundRecord(2, 1.0, 0.0, 0.1, 2.0, True, {"accuracy": 0.5})


def test_a_curve_has_the_rounds_that_have_the_metric_and_a_misspelt_one_is_refused():
    history = History([FIRST, SECOND])
    assert (history.curve("accuracy"), History().curve("auc")) == ([(2, 0.5)], [])
    with pytest.raises(KeyError, match=r"acuracy: no round has it; known names: accuracy, .*error.*lr"):
        history.curve("acuracy")


def test_a_metric_without_test_data_is_refused_with_the_reason():
    history = History([FIRST])
    assert history.curve("error") == [(1, 0.0)]
    with pytest.raises(KeyError, match=r"accuracy: .*the model was not evaluated: pass test= to fit"):
        history.curve("accuracy")


def test_a_frame_has_one_row_per_round():
    frame = History([FIRST, SECOND]).to_frame()
    assert list(frame["round"]) == [1, 2]
    assert frame["accuracy"].isna().tolist() == [True, False]
