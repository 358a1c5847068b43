"""The ledger counts every round durably, refuses what exceeds the budget, and never forgets."""

import json
import multiprocessing
import os
import re

import pytest
from filelock import FileLock

from fedveil.errors import Aborted, BadArgument
from fedveil.privacy import ledger
from fedveil.privacy.accounting import affordable_rounds, composed_epsilon, epsilon, filtered_epsilon, renyi_epsilon
from fedveil.privacy.ledger import MAX_SETTINGS, PrivacyLedger
from fedveil.secagg.policy import Policy, PrivacyLimits

SERVER = "ab" * 32


def test_rounds_of_several_kinds_compose():
    """As tight as one kind where both are the same, at least each alone, and at most their sum at half the delta."""
    alone = epsilon(300, 1.0, 1e-5, 0.05)
    nearly = 1.0 + 1e-9
    assert composed_epsilon({(1.0, 0.05): 150, (nearly, 0.05): 150}, 1e-5) == pytest.approx(alone, rel=1e-3)
    other = epsilon(20, 4.0, 1e-5)
    both = composed_epsilon({(1.0, 0.05): 300, (4.0, 1.0): 20}, 1e-5)
    assert max(alone, other) < both < epsilon(300, 1.0, 5e-6, 0.05) + epsilon(20, 4.0, 5e-6)
    assert both < renyi_epsilon(300, 1.0, 5e-6, 0.05) + renyi_epsilon(20, 4.0, 5e-6)
    assert composed_epsilon({}, 1e-5) == 0


def test_the_last_affordable_round_is_the_last(tmp_path):
    own, spent = PrivacyLedger(tmp_path / "d.ledger", 3.0, 1e-5), affordable_rounds(3.0, 2.0, 1e-5, 0.3)
    for _ in range(spent):
        own.charge(2.0, 0.3)
    with pytest.raises(Aborted, match="budget of epsilon 3"):
        own.charge(2.0, 0.3)
    assert epsilon(spent, 2.0, 1e-5, 0.3) <= 3.0 < epsilon(spent + 1, 2.0, 1e-5, 0.3)
    assert own.spent() == {(2.0, 0.3): spent}
    assert own.epsilon() == epsilon(spent, 2.0, 1e-5, 0.3)
    with pytest.raises(Aborted, match="budget"):
        PrivacyLedger(own.path, 3.0, 1e-5).charge(2.0, 0.3)  # another process, another run
    PrivacyLedger(own.path, 3.5, 1e-5).charge(2.0, 0.3)  # the site raises its budget


def test_another_kind_counts_against_the_same_budget(tmp_path):
    own = PrivacyLedger(tmp_path / "d.ledger", 3.0, 1e-5, varying=True)
    for _ in range(5):
        own.charge(2.0, 0.3)
    with pytest.raises(Aborted, match="budget of epsilon"):
        own.charge(0.3, 1.0)
    own.charge(4.0, 0.1)
    assert own.spent() == {(2.0, 0.3): 5, (4.0, 0.1): 1}


def test_a_server_cannot_choose_settings_after_seeing_sums(tmp_path):
    own = PrivacyLedger(tmp_path / "d.ledger", 3.0, 1e-5)
    own.charge(2.0, 0.3)
    with pytest.raises(Aborted, match=r"noise 2 and rate 0\.3, which must not change"):
        own.charge(4.0, 0.3)
    own.charge(2.0, 0.3)
    PrivacyLedger(own.path, 3.0, 1e-5, varying=True).charge(4.0, 0.3)  # the site changes its policy
    with pytest.raises(Aborted, match="must not change"):
        own.charge(2.0, 0.3)
    assert own.spent() == {(2.0, 0.3): 2, (4.0, 0.3): 1}


@pytest.mark.parametrize("spent", [{(2.0, 0.3): 20}, {(1.0, 1.0): 1, (8.0, 0.05): 30}])
def test_an_epsilon_for_varying_settings_is_larger_than_for_settings_fixed_in_advance(spent):
    """It is the Rényi bound of one order, so it is also at least the best order's for a single kind."""
    own = filtered_epsilon(spent, 1e-5, 3.0)
    assert own > composed_epsilon(spent, 1e-5)
    if len(spent) == 1:
        (((noise, rate), rounds),) = spent.items()
        assert renyi_epsilon(rounds, noise, 1e-5, rate) <= own < 1.5 * renyi_epsilon(rounds, noise, 1e-5, rate)
    assert filtered_epsilon({}, 1e-5, 3.0) == 0


def test_a_missing_ledger_is_not_an_empty_one(tmp_path):
    own = PrivacyLedger(tmp_path / "d.ledger", 3.0, 1e-5)
    own.charge(2.0, 0.3)
    kept = own.path.read_text()
    own.path.unlink()
    with pytest.raises(BadArgument, match="restore it from a backup"):
        own.charge(2.0, 0.3)
    own.path.write_text(kept)
    own.charge(2.0, 0.3)
    (tmp_path / "e.ledger").symlink_to(tmp_path / "elsewhere" / "d.ledger")
    with pytest.raises(BadArgument, match="symbolic link"):
        PrivacyLedger(tmp_path / "e.ledger", 3.0, 1e-5).charge(2.0, 0.3)


def test_a_locked_ledger_is_an_error_and_not_an_endless_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LOCK_TIMEOUT", 0.01)
    own = PrivacyLedger(tmp_path / "d.ledger", 3.0, 1e-5)
    own.charge(2.0, 0.3)
    with FileLock(tmp_path / "d.ledger.lock"), pytest.raises(BadArgument, match="another process has locked"):
        own.charge(2.0, 0.3)
    own.charge(2.0, 0.3)
    assert own.spent() == {(2.0, 0.3): 2}


ROWS = ["[1.0, 0.5, 0]", "[1.0, 0.5, 1.9]", "[Infinity, 0.5, 1]", "[1.0, 0.5, 5], [1.0, 0.5, 1]", "[1.0, 0.5, true]"]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema": 2, "rounds": []}', *[f'{{"schema": 1, "rounds": [{row}]}}' for row in ROWS]]
)
def test_a_damaged_ledger_ends_the_clients_part(text, tmp_path):
    own = PrivacyLedger(tmp_path / "d.ledger", 3.0, 1e-5)
    own.path.write_text(text)
    with pytest.raises(BadArgument, match="do not delete it"):
        own.charge(2.0, 0.3)
    assert own.path.read_text() == text


def test_a_server_cannot_fill_the_ledger_with_kinds(tmp_path):
    own = PrivacyLedger(tmp_path / "d.ledger", 900.0, 1e-5, varying=True)
    rows = [[2.0 + k / 1000, 0.3, 1] for k in range(MAX_SETTINGS)]
    own.path.write_text(json.dumps({"schema": 1, "rounds": rows}))
    with pytest.raises(Aborted, match="different settings"):
        own.charge(9.0, 0.3)


def send_forever(path, pipe):
    own = PrivacyLedger(path, 50.0, 1e-5)
    while True:
        own.charge(4.0, 0.2)
        os.write(pipe, b"x")  # an upload


def test_a_client_that_is_killed_twenty_times_counts_every_round(tmp_path):
    path, sent = tmp_path / "d.ledger", 0
    PrivacyLedger(path, 50.0, 1e-5).charge(4.0, 0.2)  # imports the library before the forks
    for _ in range(20):
        reader, writer = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=send_forever, args=(path, writer))
        process.start()
        os.close(writer)
        sent += len(os.read(reader, 1))
        process.kill()
        process.join()
        while more := os.read(reader, 1000):
            sent += len(more)
        os.close(reader)
    assert 20 <= sent <= PrivacyLedger(path, 50.0, 1e-5).spent()[4.0, 0.2] - 1 <= sent + 20  # the upload may be lost


def write_policy(folder, table):
    path = folder / "alice.policy"
    path.write_text(f'server = "{SERVER}"\nmin_records = 5\n{table}')
    path.chmod(0o644)
    return path


def test_a_policy_has_a_table_of_limits(tmp_path):
    table = '[privacy]\ndataset = "patients-2026"\nrecords = 8000\nepsilon = 3\nnoise = 0.7\n'
    own = Policy.read(write_policy(tmp_path, table))
    assert own.privacy == PrivacyLimits("patients-2026", 8000, 3, tmp_path / "patients-2026.ledger", noise=0.7)
    assert Policy.read(write_policy(tmp_path, "")).privacy is None


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ('[privacy]\ndataset = "d"\nrecords = 10\n', "dataset, records and epsilon"),
        ('[privacy]\ndataset = "../d"\nrecords = 10\nepsilon = 3\n', "letters, digits"),
        ('[privacy]\ndataset = "d"\nrecords = 0\nepsilon = 3\n', "records"),
        ('[privacy]\ndataset = "d"\nrecords = 10\nepsilon = 3\nnoise = 0.01\n', "noise must be a number from 0.1"),
        ('[privacy]\ndataset = "d"\nrecords = 10\nepsilon = 3\nledger = "x"\n', "ledger"),
        ("privacy = 3\n", "table"),
    ],
)
def test_limits_that_mean_nothing_are_refused(table, text, tmp_path):
    with pytest.raises(BadArgument, match=text):
        Policy.read(write_policy(tmp_path, table))


def test_the_template_of_a_policy_has_valid_limits(tmp_path):
    path = Policy(server=bytes.fromhex(SERVER)).write(tmp_path / "alice.policy")
    settings, table = path.read_text().split("# [privacy]\n")
    path.write_text(settings + "[privacy]\n" + re.sub("^# ", "", table, flags=re.MULTILINE))
    assert Policy.read(path).privacy.dataset == "patients-2026"
