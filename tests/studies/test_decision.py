"""The answers for people who decide follow from the verdicts, and say what is not known."""

import pytest
from tests.studies.test_audit import audit, point

from fedveil.attacks.scores import Estimate
from fedveil.studies.audit import results as page
from fedveil.studies.audit.decision import TEXTS, decide, grade_sharing, per_hundred
from fedveil.studies.audit.results import MembershipResults, ModelFigures, judge_all
from fedveil.studies.gradients.server import ServerResults
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.attacks import AttackScores
from fedveil.studies.verdicts import MEMBERSHIP, judge

SAFE, WORST, CHANGE, SURE = (TEXTS[f"ask_{name}"] for name in ("safe", "worst", "change", "sure"))


def answers(results, plain):
    found = decide(results, plain, judge_all(results, plain))
    return found, {question: " ".join(own) for question, own in found.answers.items()}


@pytest.mark.parametrize(
    ("low", "value", "high", "grade"),
    [
        (0.56, 0.6, 0.64, "clear"),
        (0.505, 0.52, 0.53, "slight"),
        (0.49, 0.5, 0.51, "nothing"),
        (0.4, 0.5, 0.6, "unknown"),
        (0.36, 0.4, 0.44, "clear"),  # an attacker that reverses its answers
    ],
)
def test_the_grade_follows_from_the_interval(low, value, high, grade):
    (figure,) = MEMBERSHIP.compare([("loss", Estimate(value, low, high))], 0.5, 2)
    assert grade_sharing(judge(MEMBERSHIP, 0.5, [figure], [figure])) == grade
    assert grade_sharing(None) == "unknown"


def test_counts_out_of_a_hundred_are_not_rounded_to_certainty():
    assert [per_hundred(value) for value in (0.5, 0.69, 0.999, 1.0, 0.001, 0.0)] == [
        *("50", "69", "99.9", "100", "0.1", "0"),
    ]


def test_a_leak_is_told_with_its_numbers_and_what_to_change():
    plain = audit(1.0, 40.0, members={"as published": 0.7})
    found, said = answers({"veil": audit(1.0, 40.0, members={"own labels": 0.6})}, plain)
    assert found.headline == TEXTS["headline_clear"]
    assert "in 70 of 100 such pairs" in said[SAFE]
    assert "names 10 of 100 people" in said[SAFE]
    assert "With the defence “veil”" in said[WORST]
    assert "it is right in 60 of 100 pairs" in said[WORST]
    assert "closely enough to recognise" in said[WORST]
    assert TEXTS["server_untried"].format(reason="") in said[WORST]
    assert "differential privacy" in said[CHANGE]
    assert "use larger batches" in said[CHANGE]


def test_why_the_server_was_not_tried_is_said():
    curious = ServerResults([Failure("csv: the records are not images.")])
    plain = audit(1.0, 40.0, members={"as published": 0.7}, server=curious)
    _, said = answers({"plain": plain}, plain)
    assert "the operator of the server can do (csv: the records are not images). Assume" in said[WORST]


def test_a_defence_that_changes_nothing_is_said_to_change_nothing():
    plain = audit(1.0, 40.0, members={"as published": 0.7})
    _, said = answers({"plain": plain, "veil": plain, "spn": audit(1.0, 40.0, members={"as published": 0.6})}, plain)
    assert said[WORST].count("Without any defence, it gets a copy") == 1
    assert TEXTS["same"].format(defence="veil") in said[WORST]
    assert "With the defence “veil”" not in said[WORST]
    assert "With the defence “spn”, it gets a copy" in said[WORST]
    _, said = answers({"veil": plain}, plain)  # without plain on the page, nothing is left out
    assert "With the defence “veil”, it gets a copy" in said[WORST]


def test_nothing_found_is_not_called_safe_and_too_few_records_are_not_called_nothing():
    plain = audit(0.1, 11.0, members={"as published": 0.5})
    found, said = answers({"plain": plain}, plain)
    assert found.headline == TEXTS["headline_nothing"]
    assert "not a proof" in found.headline
    assert "differential privacy" not in said[CHANGE]
    wide = AttackScores(point(0.5), Estimate(0.55, 0.4, 0.7), {"0.01": None, "0.001": None})
    few = audit(0.1, 11.0)
    view = ModelFigures(point(0.1), membership=MembershipResults({"loss": wide}))
    few.attackers.clear()
    few.attackers["as published"] = view
    found, said = answers({"plain": few}, few)
    assert found.headline == TEXTS["headline_unknown"]
    assert "Do not read this as safe" in said[SAFE]
    assert "--trials 50" in said[CHANGE]


def test_what_was_not_measured_is_named():
    plain = audit(1.0, None, members={"as published": 0.5})
    _, said = answers({"plain": plain}, plain)
    assert "We did not measure whether the insider can rebuild a person's record" in said[WORST]
    shown = page.show({"plain": plain})
    assert list(page.find_answers(shown)) == [SAFE, WORST, CHANGE, SURE]
    assert shown.page("").verdict == TEXTS["headline_nothing"]
