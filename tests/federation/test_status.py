"""The status of a run says who answered, who did not and why, and how long it takes; private runs say no more."""

import json
import re
from dataclasses import replace

import pytest
from tests.federation.test_remote import server_of
from tests.small import federation, pairs

from fedveil import Federation, Privacy
from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.federation import run_folder
from fedveil.federation.history import RoundRecord
from fedveil.federation.status import (
    ClientStatus,
    RunStatus,
    describe_status,
    list_clients,
    measure_pace,
    read_status,
    update_clients,
)
from fedveil.signals import Termination

SILENT = {("site-2", number): lambda data: None for number in range(1, 6)}


@pytest.fixture(autouse=True)
def _every_round(monkeypatch):
    monkeypatch.setattr(run_folder, "INTERVAL", 0.0)
    monkeypatch.setattr(run_folder, "PAUSE_FACTOR", 0)


def pages_of(server, folder, **options):
    """The pages and status after each round, before the first and after the last; the server trains for four."""
    pages, states = [], []

    def look(*_):
        pages.append((folder / "report.html").read_text())
        states.append(read_status(folder))

    server.engine.start_round, start = lambda: (look() if not pages else None, start())[1], server.engine.start_round
    server.fit(rounds=4, folder=folder, on_round=look, **options)
    look()
    return pages, states


def test_a_page_that_takes_long_is_written_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "PAUSE_FACTOR", 10**9)  # the pause is the longest one, ten minutes
    pages, _ = pages_of(server_of(), tmp_path)
    assert len(set(pages[:-1])) == 1
    assert 'http-equiv="refresh"' not in pages[-1]


def test_the_page_reloads_itself_until_the_run_has_ended(tmp_path):
    server = server_of()
    pages, states = pages_of(server, tmp_path)
    assert [('http-equiv="refresh"' in page) for page in pages] == [True] * 5 + [False]
    assert [state.state for state in states] == ["waiting", *["training"] * 4, "finished"]
    assert [state.round for state in states] == [0, 1, 2, 3, 4, 4]
    assert "Waiting for the first of 4 rounds" in pages[0]
    assert "connected at the start: site-1, site-2, site-3" in pages[0]
    assert "Training: round 2 of 4 (50%)" in pages[2]
    assert '<progress value="0.5"' in pages[2]
    assert "<progress" not in pages[-1]
    for page in pages:
        assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


def test_the_status_names_who_answered_and_who_did_not_and_why(tmp_path, capsys):
    server, folder = server_of(SILENT), tmp_path / "workspace" / "run"
    _, states = pages_of(server, folder)
    clients = states[-1].clients
    assert {name: (one.asked, one.answered) for name, one in clients.items()} == {
        "site-1": (4, 4),
        "site-2": (4, 1),
        "site-3": (4, 4),
    }
    assert (clients["site-2"].last, clients["site-2"].fault_round) == (1, 4)
    assert clients["site-2"].fault.startswith("silent")
    assert main(["status", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "Finished: round 4 of 4" in printed
    assert re.search(r"site-2 +1 of 4 +failed: silent: no answer within 0.3 s; last answer in round 1", printed)
    assert re.search(r"site-1 +4 of 4 +answered in ", printed)
    assert main(["status", str(tmp_path), "--json"]) == 0  # finds the run below
    assert json.loads(capsys.readouterr().out)["clients"]["site-2"]["answered"] == 1


def test_a_refused_update_is_not_an_answer():
    before = {"a": ClientStatus(1, 1, 1), "b": ClientStatus(1, 1, 1)}
    faults = ["client b: refused: its norm is 9, more than 1"]
    found = update_clients(before, 2, ["a", "b"], {"a": 0.5, "b": 0.25}, faults, True)
    assert found["a"] == ClientStatus(2, 2, 2, 0.5)
    assert (found["b"].asked, found["b"].answered, found["b"].fault_round) == (2, 1, 2)
    assert update_clients({}, 1, ["a"], {"a": 0.5}, [], False)["a"].seconds is None


def test_slow_clients_are_named_and_those_that_failed_come_first():
    quick = {f"q{number}": ClientStatus(3, 3, 3, 0.4) for number in range(3)}
    clients = {**quick, "slow": ClientStatus(3, 3, 3, 2.0), "gone": ClientStatus(3, 2, 2, 0.1, "silent: late", 3)}
    status = RunStatus("training", 3, 9, 0.0, 30.0, 10.0, clients=clients)
    rows = list_clients(status)
    assert [row[0] for row in rows] == ["gone", "slow", "q0", "q1", "q2"]
    assert rows[0][2] == "failed: silent: late; last answer in round 2"
    assert rows[1][2] == "slow: answered in 2 s"
    assert not any("slow" in row[2] for row in rows[2:])


def test_the_expected_end_follows_from_the_last_rounds():
    records = [RoundRecord(n, n, 0.0, 0.1, seconds=100.0 + 2.0 * n) for n in range(1, 41)]  # a slow start
    assert measure_pace(records) == pytest.approx(2.0)
    status = RunStatus("training", 40, 100, 0.0, 1000.0, 2.0)
    assert status.expected_end == 1000 + 60 * 2
    assert describe_status(status, 1000.0)["expected end"] == "1970-01-01 00:18:40 UTC, in 2 min (2 s per round)"
    assert replace(status, state="finished").expected_end is None


def test_a_failure_is_in_the_status_and_on_the_page(tmp_path):
    server = server_of({(f"site-{k}", n): lambda data: None for k in (1, 2, 3) for n in range(2, 9)})
    with pytest.raises(Exception, match="no valid reply"):
        server.fit(rounds=4, folder=tmp_path)
    status = read_status(tmp_path)
    assert (status.state, status.round) == ("failed", 2)
    assert "no valid reply" in status.message
    page = (tmp_path / "report.html").read_text()
    assert "Failed: round 2 of 4" in page
    assert 'http-equiv="refresh"' not in page


def test_an_exception_of_other_code_is_named_by_its_type_only(tmp_path):
    def fail(record):
        raise ValueError("a secret")

    with pytest.raises(ValueError, match="a secret"):
        federation().fit(rounds=2, folder=tmp_path, on_round=fail)
    assert read_status(tmp_path).message == "ValueError"
    assert "a secret" not in (tmp_path / "report.html").read_text()


def test_the_status_of_a_private_run_has_its_budget_and_nothing_that_depends_on_data(tmp_path):
    privacy = Privacy(noise=1.0, rate=0.5)
    run = federation("plain", privacy=privacy)
    run.fit(rounds=2, test=pairs(5)[0], evaluate_every=1, folder=tmp_path)
    status = read_status(tmp_path)
    assert status.metrics == {}
    assert status.epsilon == pytest.approx(run.history.records[-1]["epsilon"])
    assert (status.budget, status.delta) == (run.defence_server.accountant.budget, privacy.delta)
    assert "epsilon spent" in describe_status(status)
    values = json.loads((tmp_path / "status.json").read_text())
    times = {"started", "updated", "pace"}
    assert values.keys() - times == {
        *("schema", "state", "round", "rounds", "metrics", "epsilon", "budget", "delta", "message", "clients")
    }


def test_metrics_are_labelled_by_the_records_they_were_measured_on(tmp_path):
    run, held_out = federation("plain"), pairs(5)[0]
    run.fit(rounds=1, validation=held_out, test=held_out, metrics={"lift": lambda t, p: 2.0}, folder=tmp_path)
    facts = describe_status(read_status(tmp_path))
    assert facts["validation lift"] == facts["lift"] == "2"
    assert {"test mse", "validation mse"} <= facts.keys()
    assert not any("_" in name or name == "test lift" for name in facts)


@pytest.mark.parametrize("at", [0, 2])
def test_a_run_stopped_by_a_signal_says_which_round_is_saved_and_how_to_resume(tmp_path, at):
    run, exchange = federation("veil"), Federation._exchange

    def stop(server):
        if server.round == at:
            raise Termination
        return exchange(server)

    run._exchange = lambda: stop(run)
    with pytest.raises(Termination):
        run.fit(rounds=4, folder=tmp_path, verbose=False)
    status = read_status(tmp_path)
    resume = f"round 2 is saved; resume with fit(folder={str(tmp_path)!r}, resume=True)"
    assert (status.state, status.round, status.ended) == ("stopped", at, True)
    assert status.message == (resume if at else "no round is saved; start the run again")
    page = (tmp_path / "report.html").read_text()
    assert f"Stopped: round {at} of 4" in page
    assert 'http-equiv="refresh"' not in page
    assert "Failed:" not in page
    federation("veil").fit(rounds=4, folder=tmp_path, resume=True, verbose=False)
    assert read_status(tmp_path).state == "finished"


def test_a_resumed_run_keeps_its_start_and_a_finished_one_is_not_changed(tmp_path):
    def fit(rounds, **options):
        run = federation("veil")
        run.fit(rounds=rounds, test=pairs(5)[0], folder=tmp_path, verbose=False, **options)
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".json", ".html")}

    first = fit(2)
    started = read_status(tmp_path).started
    assert fit(2, resume=True) == first
    longer = fit(4, resume=True)
    assert (read_status(tmp_path).started, read_status(tmp_path).round) == (started, 4)
    (tmp_path / "report.html").unlink()
    restored = fit(4, resume=True)
    assert restored.keys() == longer.keys() == first.keys()
    assert json.loads(restored["status.json"])["started"] == started


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "neither this folder nor its subfolders contain" in capsys.readouterr().err
    with pytest.raises(BadArgument, match="no run has been started"):
        read_status(tmp_path)
