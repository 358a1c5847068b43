"""The folder of a run that was interrupted: who may resume it, its models, metrics and privacy."""

import json

import pytest
import torch
from tests.federation.kept import (
    EVERY,
    HOW,
    LAST,
    PREVIOUS,
    ROUNDS,
    TEST,
    HalfWay,
    Plateau,
    equal,
    halving,
    impatient,
    make,
    net,
    records_of,
    sgd,
    stop_at,
)
from tests.small import federation
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fedveil
from fedveil.data import from_records
from fedveil.defences import Plain, Private
from fedveil.errors import BadArgument
from fedveil.federation import Federation, checkpoint
from fedveil.runs.folder import record_run


def test_resume_starts_a_run_continues_one_and_leaves_a_finished_one(tmp_path):
    first = make()
    first.fit(**HOW | {"rounds": 5}, folder=tmp_path, resume=True)
    with pytest.raises(BadArgument, match=r"(?s)there is another run in this folder.*resume=True.*another folder"):
        make().fit(**HOW, folder=tmp_path)
    again = make()
    again.fit(**HOW | {"rounds": 7}, folder=tmp_path, resume=True)
    assert [record["round"] for record in again.history.records] == [1, 2, 3, 4, 5, 6, 7]
    done = make()
    done.fit(**HOW | {"rounds": 7}, folder=tmp_path, resume=True, on_round=lambda record: pytest.fail("a round"))
    assert done.history.records == again.history.records
    assert equal(done, again)
    with pytest.raises(BadArgument, match="resume=True needs the folder"):
        make().fit(rounds=1, resume=True)


@pytest.mark.parametrize("schedule", [None, halving, impatient(ReduceLROnPlateau)], ids=["none", "halving", "plateau"])
def test_resuming_with_another_learning_rate_says_which_one_is_used(tmp_path, caplog, schedule, request):
    rates = {rate: lambda parameters, rate=rate: torch.optim.SGD(parameters, rate) for rate in (0.01, 0.25)}
    make(rates[0.01], schedule).fit(**HOW | {"rounds": 8}, folder=tmp_path)
    make(rates[0.01], schedule).resume(tmp_path)
    assert "learning rate" not in caplog.text
    make(rates[0.25], schedule).resume(tmp_path)
    plateau = request.node.callspec.id == "plateau"  # which does not say what rate it began with
    assert ("the checkpoint's learning rate is used, 0.01, not 0.25" in caplog.text) != plateau


def other_clients(size=12, shift=0.0):
    return [(inputs + shift, targets) for inputs, targets in (records_of(size, 1), records_of(8, 2))]


CHANGES = {
    "records": {"clients": other_clients(shift=1.0)},
    "numbers of records": {"clients": other_clients(size=11)},
    "batch size": {"batch_size": 3},
    "seed": {"seed": 1},
    "loss": {"loss": "huber"},
    "participation": {"participation": 0.5},
    "gradient clipping": {"clip_norm": 0.5},
}


@pytest.mark.parametrize("change", CHANGES)
def test_resuming_in_another_setting_says_what_is_other(tmp_path, caplog, change):
    def build(clients=None, batch_size=4, **how):
        return Federation(net(), clients or other_clients(), "plain", batch_size=batch_size, **how)

    build().fit(rounds=3, folder=tmp_path)
    same = build()
    same.resume(tmp_path)
    assert (same.changed, caplog.text) == ([], "")
    other = build(**CHANGES[change])
    other.resume(tmp_path)
    assert change in other.changed
    assert set(other.changed) <= {change, "records"}  # other numbers of records are other records
    assert f"was trained with a different setting ({', '.join(other.changed)})" in caplog.text


def test_resuming_with_another_optimiser_is_refused(tmp_path):
    make().fit(rounds=3, folder=tmp_path)
    with pytest.raises(BadArgument, match="of the optimizer 'Adam', not 'SGD'"):
        make(lambda parameters: torch.optim.SGD(parameters, 1e-2)).resume(tmp_path)


def test_groups_of_parameters_with_keys_of_their_own_are_resumed(tmp_path):
    def grouped(parameters):
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first], "name": "first"}, {"params": others}], 1e-2)

    make(grouped).fit(rounds=3, folder=tmp_path)
    again = make(grouped)
    again.fit(rounds=5, folder=tmp_path, resume=True)
    assert [record["round"] for record in again.history.records] == [1, 2, 3, 4, 5]


def test_adding_a_schedule_says_nothing_about_the_learning_rate(tmp_path, caplog):
    make(schedule=None).fit(rounds=3, folder=tmp_path)
    make().resume(tmp_path)
    assert "learning rate" not in caplog.text


def test_a_private_round_is_on_disk_before_a_callback_hears_of_it(tmp_path):
    spent = []

    def look(record):
        again = make(defence=private())
        again.resume(tmp_path)
        spent.append((record["epsilon"], again.defence_server.accountant.epsilon()))

    make(defence=private()).fit(rounds=3, folder=tmp_path, on_round=look)
    assert len(spent) == 3
    assert all(told == kept for told, kept in spent)


def test_a_run_that_has_begun_elsewhere_does_not_replace_the_one_in_the_folder(tmp_path):
    make().fit(rounds=5, folder=tmp_path)
    before = (tmp_path / LAST).read_bytes()
    other = make()
    other.fit(rounds=2)
    for resume in (False, True):
        with pytest.raises(BadArgument, match="there is another run in this folder"):
            other.fit(rounds=3, folder=tmp_path, resume=resume)
    assert (tmp_path / LAST).read_bytes() == before


@pytest.mark.parametrize("best", [False, True])
def test_load_model_takes_the_checkpoint_if_it_is_newer(tmp_path, best):
    run = make()
    run.fit(**HOW | {"rounds": 4}, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path, checkpoint_every=1, on_round=stop_at(9))
    state = checkpoint.load(tmp_path / LAST)
    (_, first), (_, second) = run.history.curve("mse")
    assert first > second  # the best one is newer, too
    wanted = state["best"][1] if best else state["model"]
    found = fedveil.load_model(tmp_path, model=net(), best=best).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    run.fit(**HOW, folder=tmp_path)
    (tmp_path / LAST).unlink()
    (tmp_path / PREVIOUS).unlink()
    found = fedveil.load_model(tmp_path, model=net()).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in run.model.state_dict().items())


DATA = from_records("numbers", records_of(4, 3), TEST)


ABOUT = {"clients": 2, "model": "mlp"}


def recorded(folder, run=None, rounds=ROUNDS, **how):
    return record_run(run or make(), folder, DATA, ABOUT, "again", rounds=rounds, evaluate_every=EVERY, **how)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_is_refused_touches_nothing_in_the_folder(tmp_path):
    recorded(tmp_path, rounds=4)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    del before[".lock"]
    with pytest.raises(BadArgument, match=r"(?s)there is another run in this folder.*resume=True"):
        recorded(tmp_path)
    with pytest.raises(BadArgument, match="rounds"):
        recorded(tmp_path, rounds=-1, resume=True)
    for name, found in before.items():
        assert ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns) == found, name


def test_a_resumed_run_cuts_its_metrics_back_to_the_checkpoint_and_appends(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, on_round=stop_at(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "epoch": 1.0}\n{"round": 8, "ep')  # as a kill leaves them
    summary = recorded(tmp_path, resume=True)
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))
    assert recorded(tmp_path, resume=True) == summary  # submitted again
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))


def test_metrics_have_the_round_whose_evaluation_was_interrupted_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, make(schedule=impatient(Plateau)))
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, 2 * EVERY + 1))
    assert "mse" not in lines(tmp_path)[-1]
    recorded(tmp_path, make(schedule=impatient(ReduceLROnPlateau)), resume=True)
    found = lines(tmp_path)
    assert [line["round"] for line in found] == list(range(1, ROUNDS + 1))
    assert [line["round"] for line in found if "mse" in line] == [4, 8, 12]


def private():
    return Private(Plain(), 1.0, 0.5, entropy=fedveil.Entropy.for_tests(1))


def test_a_round_whose_noise_was_drawn_counts_although_it_is_undone(tmp_path):
    run = make(sgd(HalfWay), defence=private())
    with pytest.raises(KeyboardInterrupt):
        run.fit(rounds=9, folder=tmp_path)
    assert (run.round, run.defence_server.accountant.rounds) == (4, 5)
    again = make(sgd(torch.optim.SGD), defence=private())
    again.fit(rounds=9, folder=tmp_path, resume=True)
    assert (again.round, again.defence_server.accountant.rounds) == (9, 10)
    (tmp_path / LAST).write_bytes(b"garbage")
    back = make(sgd(torch.optim.SGD), defence=private())
    back.resume(tmp_path)
    assert (back.round, back.defence_server.accountant.rounds) == (8, 10)


def test_the_one_before_counts_the_noise_of_a_round_that_was_undone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(sgd(HalfWay), defence=private()).fit(rounds=9, folder=tmp_path)
    (tmp_path / LAST).write_bytes(b"garbage")
    back = make(sgd(torch.optim.SGD), defence=private())
    back.resume(tmp_path)
    assert (back.round, back.defence_server.accountant.rounds) == (4, 5)


def test_the_last_record_is_there_without_an_evaluation_and_a_metric_says_why_it_is_not(tmp_path):
    history = federation().fit(rounds=2)
    assert history.last["round"] == 2
    assert {"epoch", "error", "lr", "seconds"} <= set(history.last)
    with pytest.raises(KeyError, match="no evaluation: pass test="):
        history.last["accuracy"]
    assert json.loads(json.dumps(history.last.to_dict())) == dict(history.records[-1])
    evaluated = make().fit(rounds=6, test=TEST, evaluate_every=4).last
    assert evaluated["round"] == 6
    assert "mse" in evaluated
