"""Training as users expect it: optimisers, schedules, clipping, early stopping, callbacks, metrics."""

import copy
import json

import pytest
import torch
from sklearn.metrics import roc_auc_score
from tests.oracle import built
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from fedveil import Federation, errors
from fedveil.federation.evaluate import metrics
from fedveil.models import mlp
from fedveil.scheme import find_loss


def data(classes=None, size=24):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    if classes:
        return inputs, torch.randint(0, classes, (size,), generator=generator)
    return inputs, torch.randn(size, 4, generator=generator, dtype=torch.float64)


def net(outputs=4):
    return built(lambda: mlp(6, outputs, hidden=8))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def test_an_optimiser_object_trains_as_its_factory_does():
    one, other = net(), net()
    Federation(one, [data()], "plain", torch.optim.Adam(one.parameters(), 0.01)).fit(3)
    Federation(other, [data()], "plain", lambda p: torch.optim.Adam(p, 0.01)).fit(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"optimizer": lambda p: None}, "optimizer created a NoneType"),
        ({"optimizer": torch.optim.SGD(net().parameters(), 0.1)}, "parameters that are not this model's"),
        ({"schedule": "cosine"}, "schedule is 'cosine'"),
        ({"schedule": lambda o: 0.1}, "schedule created a float"),
        ({"schedule": StepLR(sgd(net().parameters()), 1)}, "the schedule is of another optimizer"),
        ({"schedule_every": "batch"}, "there is no schedule_every 'batch'"),
        ({"clip_norm": 0.0}, "clip_norm must be a finite number above 0"),
    ],
)
def test_what_is_no_optimiser_or_schedule_is_refused(options, text):
    with pytest.raises(errors.BadArgument, match=text):
        Federation(net(), [data()], "plain", **options)


def test_a_schedule_object_of_the_optimiser_is_taken():
    model = net()
    optimizer = sgd(model.parameters())
    federation = Federation(model, [data()], "plain", optimizer, schedule=StepLR(optimizer, 1, 0.5), batch_size=8)
    federation.fit(2)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


def test_a_schedule_steps_every_round_if_asked_and_records_have_the_rate():
    federation = Federation(
        net(), [data()], "plain", sgd, schedule=lambda o: StepLR(o, 1, 0.5), schedule_every="round", batch_size=8
    )
    history = federation.fit(1)
    assert [record["lr"] for record in history.records] == [0.1, 0.05, 0.025]


def test_a_clipped_step_is_that_of_the_clipped_gradient():
    model = net()
    start = copy.deepcopy(model)
    federation = Federation(model, [data()], "veil", sgd, clip_norm=0.01)
    federation.step()
    plain = Federation(start, [data()], "plain", sgd)
    gradients = plain.exchange().gradients
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert norm > 0.1  # so that it is clipped
    for name, parameter in start.named_parameters():
        expected = parameter - 0.1 * gradients[name] * (0.01 / (norm + 1e-6))  # torch's own guard against 0
        torch.testing.assert_close(dict(model.named_parameters())[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_lowers_the_rate_whichever_way_the_metric_goes(mode):
    inputs, classes = data(4)
    frozen = lambda p: torch.optim.SGD(p, 1e-30)  # noqa: E731  (nothing improves)
    federation = Federation(
        net(), [(inputs, classes)], "plain", frozen, schedule=lambda o: ReduceLROnPlateau(o, mode, 0.1, patience=1)
    )
    history = federation.fit(4, test=(inputs, classes))
    assert [record["lr"] for record in history.records] == pytest.approx([1e-30, 1e-30, 1e-30, 1e-31])


def test_a_plateau_of_a_rising_metric_is_refused_for_numbers():
    federation = Federation(net(), [data()], "plain", sgd, schedule=lambda o: ReduceLROnPlateau(o, "max"))
    with pytest.raises(errors.BadArgument, match="this task has none"):
        federation.fit(1, test=data())


@pytest.mark.parametrize("options", [{"patience": 2}, {}])
def test_waiting_for_progress_needs_test_data(options):
    schedule = None if options else (lambda o: ReduceLROnPlateau(o))
    federation = Federation(net(), [data()], "plain", sgd, schedule=schedule)
    with pytest.raises(errors.BadArgument, match=r"(?s)needs a metric, and there are no test data.*test=test"):
        federation.fit(1, **options)


def test_training_stops_early_and_a_resumed_run_stays_stopped(tmp_path):
    def federation():
        return Federation(net(), [data()], "plain", lambda p: torch.optim.SGD(p, 1e-30))

    first = federation()
    history = first.fit(50, test=data(), patience=3, folder=tmp_path)
    assert len(history.records) == 4  # the first evaluation, and three that are no better
    second = federation()
    second.resume(tmp_path)
    assert len(second.fit(50, test=data(), patience=3).records) == 4
    assert len(second.fit(50, test=data(), patience=6).records) == 7


def test_training_that_improves_is_not_stopped():
    history = Federation(net(), [data()], "plain", sgd).fit(8, test=data(), patience=1)
    values = [value for _, value in history.curve("mse")]
    assert values == sorted(values, reverse=True)
    assert len(values) == 8


def test_every_callback_gets_every_record():
    first, second = [], []
    history = Federation(net(), [data()], "plain", sgd).fit(3, on_round=[first.append, second.append])
    assert first == second == history.records
    for wrong in (["print"], "print"):
        with pytest.raises(errors.BadArgument, match="on_round is 'print'"):
            Federation(net(), [data()], "plain", sgd).fit(1, on_round=wrong)


def test_a_folder_may_be_a_string(tmp_path):
    folder = str(tmp_path / "run")
    federation = Federation(net(), [data()], "plain", sgd)
    federation.fit(2, folder=folder)
    federation.save(folder)
    again = Federation(net(), [data()], "plain", sgd)
    again.resume(folder)
    assert again.round == federation.round


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_scikit_learns(ties):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    outputs = outputs.round() if ties else outputs
    targets = torch.randint(0, 2, (200,), generator=generator)
    expected = roc_auc_score(targets, outputs[:, 1] - outputs[:, 0])
    assert metrics(outputs, targets)["auc"] == pytest.approx(expected, abs=1e-12)
    single = metrics(outputs[:, :1], targets, find_loss("binary_cross_entropy"))
    assert single["auc"] == pytest.approx(roc_auc_score(targets, outputs[:, 0]), abs=1e-12)
    assert "auc" not in metrics(outputs, torch.zeros(200, dtype=torch.int64))  # one class only
    assert "auc" not in metrics(torch.randn(9, 3), torch.arange(9) % 3)


def test_a_schedule_that_waits_is_resumed_with_what_it_saw(tmp_path):
    def federation():
        return Federation(
            net(),
            [data()],
            "plain",
            lambda p: torch.optim.SGD(p, 1e-30),
            schedule=lambda o: ReduceLROnPlateau(o, patience=1),
        )

    federation().fit(3, test=data(), folder=tmp_path)
    second = federation()
    second.resume(tmp_path)
    assert second.fit(4, test=data()).records[-1]["lr"] == pytest.approx(1e-31)


def test_a_cosine_over_rounds_ends_at_nothing():
    federation = Federation(
        net(), [data()], "plain", sgd, schedule=lambda o: CosineAnnealingLR(o, 6), schedule_every="round", batch_size=8
    )
    records = federation.fit(2).records
    assert federation.optimizer.param_groups[0]["lr"] < 1e-12
    assert json.dumps([record.to_dict() for record in records])
