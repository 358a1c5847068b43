"""The curves of a history: a name that no record has is refused with those that there are."""

import sys

import matplotlib
import pytest

from fedveil.errors import BadArgument
from fedveil.federation.history import History, RoundRecord

FIRST, SECOND = RoundRecord(1, 0.5, 0.0, 0.1, 1.0), RoundRecord(2, 1.0, 0.0, 0.1, 2.0, True, {"accuracy": 0.5})


def test_a_curve_has_the_rounds_that_have_the_metric_and_a_misspelt_one_is_refused():
    history = History([FIRST, SECOND])
    assert (history.curve("accuracy"), History().curve("auc")) == ([(2, 0.5)], [])
    with pytest.raises(KeyError, match=r"no round has a value named .acuracy.; available names: accuracy, .*error.*lr"):
        history.curve("acuracy")


def test_a_metric_without_test_data_is_refused_with_the_reason():
    history = History([FIRST])
    assert history.curve("error") == [(1, 0.0)]
    with pytest.raises(KeyError, match=r"accuracy.*the model was not evaluated: pass test= or validation= to fit"):
        history.curve("accuracy")


def test_a_frame_has_one_row_per_round():
    frame = History([FIRST, SECOND]).to_frame()
    assert list(frame["round"]) == [1, 2]
    assert frame["accuracy"].isna().tolist() == [True, False]


def test_a_history_is_short_in_a_notebook():
    metrics = {"accuracy": 0.5, "balanced_accuracy": 0.4, "validation_loss": 2.0}
    records = [RoundRecord(number, 1.0, 0.0, 0.1, 1.0, True, metrics) for number in range(1, 400)]
    assert repr(History(records)) == "History(399 rounds, accuracy 0.5, validation_loss 2)"


def test_a_plot_has_the_curves_of_the_main_metric():
    matplotlib.use("agg")
    records = [RoundRecord(n, n, 0.0, 0.1, 1.0, True, {"validation_mse": 1 / n, "mae": n}) for n in (1, 2, 3)]
    records[-1].metrics["mse"] = 2.0
    axes = History(records).plot()
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"validation_mse": [[1, 1], [2, 1 / 2], [3, 1 / 3]], "mse": [[3, 2]]}
    assert [line.get_label() for line in History(records).plot("mae", ax=axes).lines][-1] == "mae"
    with pytest.raises(KeyError, match=r"no round has a value named .f1."):
        History(records).plot("f1")


def test_a_plot_without_matplotlib_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadArgument, match=r"(?s)matplotlib is not installed.*pip install 'fedveil\[plots\]'"):
        History([SECOND]).plot()


def test_the_names_of_a_history_are_those_of_its_records():
    plain = RoundRecord(1, 1.0, 0.0, 0.1, 1.0, figures={"epsilon": 1.0}, notes={"faults": ("late",)})
    for records in ([], [plain], [plain, SECOND], [SECOND]):
        assert History(records).names == {name for record in records for name in record.to_dict()}


def test_a_plot_of_no_rounds_is_refused():
    with pytest.raises(BadArgument, match="there are no rounds yet"):
        History().plot()
