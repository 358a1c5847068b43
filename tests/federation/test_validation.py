"""Validation data choose the best model, and test data are used once; one metric is monitored for everything."""

import logging
import math

import pytest
import torch
from sklearn.metrics import fbeta_score
from tests.federation.kept import stop_at
from tests.small import adam, federation, net, pairs
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedveil import Federation, Privacy
from fedveil.errors import BadArgument
from fedveil.federation.fitting import Evaluation

VALIDATION, TEST = pairs(30, 30, seed=3)
BOTH = {"validation": VALIDATION, "test": TEST}
NEVER = {"metrics": {"constant": lambda targets, predictions: 1.0}, "monitor": "constant", "mode": "max"}


def classes(records, offset=0):
    inputs, targets = records
    return inputs, (targets[:, 0] > offset).long()


def classifier(**options):
    return Federation(net(), [classes(own) for own in pairs(12, 8)], "plain", adam, batch_size=4, **options)


def rounds_with(history, name):
    return [record.round for record in history.records if name in record.metrics]


@pytest.mark.parametrize(("options", "tested"), [({}, [9]), ({"track_test": True}, [3, 6, 9])])
def test_the_test_data_are_evaluated_once_unless_the_user_wants_more(options, tested):
    run = federation()
    history = run.fit(3, **BOTH, **options)
    assert (rounds_with(history, "validation_mse"), rounds_with(history, "mse")) == ([3, 6, 9], tested)
    assert run.best[0] == min(value for _, value in history.curve("validation_mse"))
    expected = (run.model(TEST[0]) - TEST[1]).double().pow(2).mean()
    assert history.last["mse"] == pytest.approx(float(expected.detach()), rel=1e-5)  # float32
    alone = federation().fit(3, validation=VALIDATION)
    assert "mse" not in alone.names
    with pytest.raises(KeyError, match="mse: the test data are evaluated at the end; use validation_mse"):
        alone.last["mse"]


def test_test_data_alone_are_evaluated_every_epoch_under_the_names_of_before():
    history = federation().fit(3, test=TEST)
    assert rounds_with(history, "mse") == [3, 6, 9]
    assert set(history.metrics) == {"mse", "mae", "r2"}


def test_training_that_stops_early_or_spends_its_budget_evaluates_the_test_data_at_its_end():
    stalled = federation().fit(9, **BOTH, **NEVER, patience=2)
    assert rounds_with(stalled, "mse") == [9]
    assert len(stalled.records) == 9
    privacy = Privacy(epsilon=3.0, rounds=3, rate=0.4)
    run = Federation(net(), pairs(12, 8), "plain", adam, privacy=privacy)
    history = run.fit(50, **BOTH, evaluate_every=2)
    assert history.records[-1].round < 50 * run.rounds_per_epoch
    assert rounds_with(history, "mse") == [history.records[-1].round]


def test_the_monitored_metric_chooses_the_best_model_and_stops_training():
    beta = lambda targets, predictions: fbeta_score(targets, predictions, beta=2, zero_division=0)  # noqa: E731
    held_out = {"validation": classes(VALIDATION), "test": classes(TEST)}
    run = classifier()
    history = run.fit(4, **held_out, metrics={"f2": beta}, monitor="f2", mode="max")
    assert run.best[0] == max(value for _, value in history.curve("validation_f2"))
    predicted = run.model(TEST[0]).argmax(1)
    assert history.last["f2"] == fbeta_score(held_out["test"][1], predicted, beta=2, zero_division=0)
    ends = [
        len(federation().fit(9, test=TEST, **NEVER | {"mode": mode}, patience=1).records) for mode in ("min", "max")
    ]
    assert ends == [6, 6]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_follows_the_monitored_metric(mode):
    schedule = lambda o: ReduceLROnPlateau(o, mode, 0.1, patience=0)  # noqa: E731
    history = federation(schedule=schedule).fit(3, test=TEST, **NEVER | {"mode": mode})
    assert [record.lr for record in history.records[::3]] == pytest.approx([1e-2, 1e-2, 1e-3])
    other = "max" if mode == "min" else "min"
    with pytest.raises(BadArgument, match=rf"(?s)ReduceLROnPlateau has mode='{mode}'.*optimizer, mode='{other}'"):
        federation(schedule=schedule).fit(3, test=TEST, **NEVER | {"mode": other})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"monitor": "f1"}, r"(?s)there is no monitor 'f1'.*'mae', 'mse', 'r2'"),
        (
            {"metrics": NEVER["metrics"], "monitor": "constant"},
            r"(?s)larger or smaller values of constant are better.*mode=\"max\"",
        ),
        ({"mode": "max"}, "mode has no effect without monitor"),
        ({"monitor": "mse", "mode": "least"}, "there is no mode 'least'"),
        ({"test": None, "monitor": "mse"}, "monitor needs a metric, but there are no held-out data"),
        ({"test": None, "metrics": NEVER["metrics"]}, "metrics needs a metric"),
        ({"track_test": 1}, "track_test must be True or False"),
        ({"validation": (VALIDATION[0], VALIDATION[1][:3])}, "validation data: inputs has 30 records"),
        ({"test": (TEST[0], torch.ones(30, 2)), "monitor": "r2"}, "r2 is not defined for these records"),
    ],
)
def test_unknown_metrics_are_refused_before_the_first_round(options, why):
    run = federation()
    with pytest.raises(BadArgument, match=why):
        run.fit(1, **{"test": TEST, **options})
    assert run.round == 0


def test_a_metric_that_is_nan_is_never_the_best():
    values = iter([1.0, math.nan, 2.0, 1.5, math.nan])  # the first is of the check before the first round
    metrics = {"odd": lambda targets, predictions: next(values)}
    run = federation()
    history = run.fit(4, test=TEST, metrics=metrics, monitor="odd", mode="max")
    assert [value for _, value in history.curve("odd")][1:3] == [2.0, 1.5]
    assert run.best[0] == 2.0


def test_a_resumed_run_keeps_the_best_model_the_patience_and_what_chose_them(tmp_path, caplog):
    how = {**BOTH, "monitor": "mae", "patience": 2}
    whole, first, second = federation(), federation(), federation()
    whole.fit(6, **how)
    with pytest.raises(KeyboardInterrupt):
        first.fit(6, **how, folder=tmp_path, on_round=stop_at(8))
    second.fit(6, **how, folder=tmp_path, resume=True)
    assert (second.best[0], second.best_by) == (whole.best[0], "validation_mae (min)")
    assert [own.metrics for own in second.history.records] == [own.metrics for own in whole.history.records]
    third = federation()
    with caplog.at_level(logging.WARNING):
        third.fit(7, test=TEST, folder=tmp_path, resume=True)
    assert "from now on, mse (min) chooses the best model, not validation_mae (min)" in caplog.text
    assert third.best[0] == third.history.last["mse"]


def test_an_interrupted_evaluation_of_the_test_data_is_repeated(tmp_path, monkeypatch):
    run, whole = federation(), federation()
    measure = Evaluation.measure_test

    def interrupt(self, server, last):
        if last:
            raise KeyboardInterrupt
        return measure(self, server, last)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, "measure_test", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.fit(3, **BOTH, folder=tmp_path)
    again = federation()
    again.fit(3, **BOTH, folder=tmp_path, resume=True)
    assert again.history.last.metrics == whole.fit(3, **BOTH).last.metrics
    assert again.best[0] == whole.best[0]
