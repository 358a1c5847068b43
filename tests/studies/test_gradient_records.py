"""The number of records that a server recovers from a batch, by attacker and protection."""

import pytest
import torch
from tests.configs import config_of

from fedveil.data import load
from fedveil.records.shards import generator
from fedveil.runs.build import build_model
from fedveil.studies.attack import AttackRequest
from fedveil.studies.gradients import records
from fedveil.studies.gradients.records import (
    DIRECTIONS,
    FLOOR,
    IMPRINT,
    RECORD_DP,
    SECURE_SUM,
    UNPROTECTED,
    CountedRound,
    RecordCount,
)
from fedveil.studies.gradients.server import SERVER, ServerOptions
from fedveil.studies.jobs import Failure, JobResults
from fedveil.studies.study import gather, publish

DIGITS = load("digits")
CONFIG = config_of(data="digits", train_size=200, defence="plain", hidden=100)


def attack(config, batches=(4,)):
    work = records.AttackRecords(config, None, batches, 0)
    found = work(lambda fraction, what: None, JobResults({}))
    return {(one.protection, one.attacker): one for one in found.counts}


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_all_records_of_a_small_batch_are_recovered_unless_noise_protects_them(defence):
    found = attack(CONFIG.changed(defence=defence, groups=10, loss="squared_error"))
    for protection, hidden in ((UNPROTECTED, False), (SECURE_SUM, False), (RECORD_DP, True)):
        assert found[protection, DIRECTIONS].found == (0 if hidden else 4), protection
        assert (found[protection, IMPRINT].found == 0) if hidden else (found[protection, IMPRINT].found >= 2)
        assert found[protection, FLOOR].found == 0


def test_tabular_records_are_recovered_and_the_study_has_a_table_for_them(tmp_path):
    config = config_of(data="diabetes", clients=2, defence="plain", hidden=100)
    asked = AttackRequest(config, ("plain",), ServerOptions(rounds=1, batches="3"))
    shown = publish(SERVER, asked, gather(SERVER, asked, tmp_path, workers=1), tmp_path, "again")
    [table] = [section for section in shown.sections if getattr(section, "title", "") == records.TITLE]
    rows = {(row[1], row[3]): row for row in table.rows}
    assert rows[UNPROTECTED, DIRECTIONS][5] == rows[SECURE_SUM, DIRECTIONS][5] == "3/3"
    assert rows[RECORD_DP, DIRECTIONS][5] == "0/3"
    assert rows[UNPROTECTED, DIRECTIONS][:5] == ["plain", UNPROTECTED, "3", DIRECTIONS, "1"]
    assert "not measured (the records are not images)" in shown.verdict


def test_attacks_that_do_not_apply_say_why():
    found = attack(CONFIG.changed(model="lenet"))
    for attacker in ("rows that agree", DIRECTIONS, IMPRINT):
        assert (found[UNPROTECTED, attacker].found, found[SECURE_SUM, attacker].found) == (0, 0)
        assert "is not a Linear" in found[UNPROTECTED, attacker].reason


def test_a_record_counts_if_a_guess_is_ten_decibels_closer_than_the_mean_and_a_guess_counts_once():
    true, mean = torch.eye(3), torch.zeros(1, 3)  # the mean's squared error is 1/3
    near = torch.eye(3) + torch.tensor([0.3, 0.0, 0.0])  # squared error 0.03
    far = torch.eye(3) + torch.tensor([0.35, 0.0, 0.0])  # squared error 0.041
    for found, count in ((near, 3), (far, 0), (near[:1], 1), (near[:1].repeat(5, 1), 1), (near[:0], 0)):
        assert records.count_recovered(found, true, mean) == count
    assert records.count_recovered(torch.full((3, 3), torch.nan), true, mean) == 0
    same = torch.ones(2, 3)
    assert records.count_recovered(same[:1], same, mean) == 1
    assert records.count_recovered(same, same, mean) == 2


def test_noise_has_the_declared_size_and_gradients_are_clipped():
    model, part = build_model(CONFIG, DIGITS), DIGITS.train.take(torch.arange(5))
    loss = records.server_gradient(model, CONFIG, part, UNPROTECTED, generator("test")).loss
    draws = [records.private_mean(model, loss, part, generator("test", number)) for number in range(2)]
    apart = torch.cat([(draws[0][name] - draws[1][name]).flatten() for name in draws[0]])
    wanted = 2**0.5 * records.NOISE * records.CLIP / 5
    assert abs(float(apart.std()) / wanted - 1) < 6 / (2 * len(apart)) ** 0.5  # six standard errors
    middle = {name: (one + draws[1][name]) / 2 for name, one in draws[0].items()}
    assert float(torch.cat([one.flatten() for one in middle.values()]).norm()) < len(apart) ** 0.5 * wanted


def test_rows_have_totals_over_rounds_an_interval_and_reasons():
    def one(found, reason=""):
        return CountedRound([RecordCount(UNPROTECTED, 4, DIRECTIONS, found, reason)])

    assert list(records.record_rows([one(4), one(2)])) == [
        [UNPROTECTED, "4", DIRECTIONS, "2", "6/8", "75.0 [34.9, 96.8]"]
    ]
    assert next(iter(records.record_rows([one(0, "no ReLU")])))[-1] == "no ReLU"
    assert next(iter(records.record_rows([one(4), Failure("it broke")])))[2] == "failed: it broke"
    assert not list(records.record_rows([]))
