"""The audit's verdict: beside the best constant answer, and only as sure as its interval is."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from tests.configs import config_of
from torch import nn

from fedveil.attacks.gradients import Search
from fedveil.attacks.observation import PUBLISHED
from fedveil.cli import main
from fedveil.data import Data, Part
from fedveil.federation.evaluate import predict
from fedveil.runs.build import load_data
from fedveil.runs.folder import open_run
from fedveil.studies.attack import Asked
from fedveil.studies.audit.results import Audited, Figures, Guessing, Members, Tried
from fedveil.studies.audit.run import AUDIT, Options, guessing_of
from fedveil.studies.estimates import Estimate, Outcome, Rule, judge_interval
from fedveil.studies.gradients.page import verdict as gradients_verdict
from fedveil.studies.gradients.results import Batch, Gradients, View
from fedveil.studies.gradients.results import Figures as Near
from fedveil.studies.membership.page import verdict as membership_verdict
from fedveil.studies.membership.results import Attacker, Membership, Scored, Sizes

NARROW = 0.005


def around(value, reach=NARROW):
    return Estimate(value, value - reach, value + reach)


MODEL, MEMBERS, RECORD = around(0.99), around(0.7), around(40.0)  # that leak


def audited(agreement=MODEL, auc=MEMBERS, psnr=RECORD, *, guess=0.5, trials=20, attacker="adaptive"):
    """An audit in which one attacker reaches these figures."""
    view = Figures(agreement, membership=Members({"loss": Tried(0.5, auc, auc, {"0.01": None, "0.001": None})}))
    rebuilt = {attacker: psnr, "floor": around(11.0)}
    looks = {attacker: view}
    return Audited("accuracy", 1.0, 1.0, 0.0, "a", 2, 1, trials, looks, rebuilt, Guessing(guess, guess))


def shown(found, plain):
    return AUDIT.present(Asked(config_of(data="digits"), ("veil",), Options()), {"veil": found, "undefended": plain})


def words(found, plain):
    """The verdicts at a glance, and in words: the model, who took part, a single record."""
    glance, text = shown(found, plain).first
    return list(glance.rows[0][1:]), text.paragraphs[0]


def test_an_attacker_that_always_answers_no_has_found_nothing():
    plain = audited(around(1.0, 0.0), guess=0.91)
    said, text = words(audited(around(0.91, 0.008), guess=0.91), plain)
    assert said[0] == "protected"
    assert "the model is protected: nothing found" in text
    assert "guessing 91% of new records" in text
    found, text = words(audited(around(0.95, 0.008), guess=0.91), plain)  # four of nine points
    assert found[0] == "partly protected"
    row = shown(audited(guess=0.91), plain).rows[-1]
    assert [row[0], row[2], row[8]] == ["guessing", "91.0", "91.0"]


def test_a_wide_interval_has_too_few_trials_to_tell():
    wide = Estimate(10.5, -18.6, 39.7)
    said, text = words(audited(psnr=wide), audited(psnr=wide))
    assert said[2] == "too few trials to tell"
    assert "a single record: too few trials to tell" in text
    assert "10 dB [-19, 40]" in text
    said, text = words(audited(auc=Estimate(0.52, 0.4, 0.64)), audited())
    assert said[1] == "too few trials to tell"
    assert "AUC of 0.52 [0.40, 0.64], which leaves open whether it guesses or has 0.55 or more" in text
    said, _ = words(audited(agreement=Estimate(0.6, 0.3, 0.85)), audited())
    assert said[0] == "too few trials to tell"


def test_one_trial_is_called_one_trial():
    point = around(10.0, 0.0)
    said, text = words(audited(psnr=point, trials=1), audited(psnr=around(90.0, 0.0), trials=1))
    assert said[2] == "too few trials to tell"
    assert "in one trial" in text


def test_an_auc_that_is_clearly_below_one_half_is_found():
    below = Estimate(0.40, 0.38, 0.43)
    said, text = words(audited(auc=below), audited(auc=around(0.62)))
    assert said[1] == "not protected"  # 0.10 of 0.12
    assert "below chance: an attacker who knows the direction" in text
    assert "1 - 0.40 = 0.60" in text
    said, text = words(audited(auc=below), audited(auc=below))
    assert said[1] == "not protected"
    assert "AUC 0.40, below chance" in shown(audited(auc=below), audited(auc=below)).verdict


def test_a_leak_below_one_half_is_stronger_than_a_smaller_one_above():
    two = audited(auc=Estimate(0.40, 0.38, 0.43))
    other = audited(auc=Estimate(0.53, 0.51, 0.55), attacker="other")
    both = dataclasses.replace(two, attackers={**two.attackers, **other.attackers})
    assert "the strongest attacker (adaptive) tells members" in words(both, audited())[1]


def test_a_narrow_interval_at_guessing_has_nothing_found():
    flat = audited(auc=around(0.5, 0.03), psnr=around(11.2, 0.5))
    said, text = words(flat, flat)
    assert said[1:] == ["nothing found", "nothing found"]
    assert "who took part: nothing found, even without a defence" in text
    said, text = words(flat, audited())
    assert said[1:] == ["protected", "protected"]


def test_a_found_leak_is_never_hidden_by_an_attacker_with_too_few_trials():
    sure, unsure = audited(auc=around(0.6)), audited(auc=Estimate(0.65, 0.4, 0.9), attacker="other")
    both = dataclasses.replace(sure, attackers={**sure.attackers, **unsure.attackers})
    said, text = words(both, audited())
    assert said[1] == "partly protected"
    assert "the strongest attacker (adaptive) tells members" in text
    little = dataclasses.replace(both, attackers={**audited(auc=around(0.51)).attackers, **unsure.attackers})
    assert words(little, audited())[0][1] == "too few trials to tell"


def test_a_defence_that_leaks_what_plain_training_does_not_is_no_protection():
    flat = audited(auc=around(0.5, 0.03))
    assert words(audited(auc=around(0.6)), flat)[0][1] == "not protected"


@pytest.mark.parametrize(
    ("low", "high", "both", "outcome"),
    [
        (0.51, 0.53, False, Outcome.FOUND),
        (0.38, 0.43, True, Outcome.FOUND),
        (0.38, 0.43, False, Outcome.NOTHING),
        (0.46, 0.54, True, Outcome.NOTHING),
        (0.44, 0.54, True, Outcome.TOO_FEW),
        (0.44, 0.56, False, Outcome.TOO_FEW),
    ],
)
def test_outcomes_follow_from_the_interval(low, high, both, outcome):
    assert judge_interval(Estimate((low + high) / 2, low, high), Rule(0.5, 0.55, both)) is outcome


def membership(**aucs):
    """A membership attack with these AUCs, one for each defence."""
    sizes = Sizes(1, 1, 1, 1)
    return {
        name: Membership("accuracy", 1.0, 0.8, 0.2, name, 0, sizes, {PUBLISHED: Attacker("V-out", {"x": scored(auc)})})
        for name, auc in aucs.items()
    }


def scored(auc):
    return Scored(around(0.5), auc, {"0.01": None, "0.001": None})


def test_the_page_of_a_membership_attack_goes_by_intervals_too():
    wide, flat, below = Estimate(0.51, 0.3, 0.7), around(0.5), Estimate(0.40, 0.38, 0.43)
    assert membership_verdict(membership(plain=wide, veil=flat)).startswith("There are too few records to tell")
    assert membership_verdict(membership(plain=flat, veil=flat)).startswith("Not even without a defence")
    said = membership_verdict(membership(plain=around(0.7), veil=below, ppdl=wide))
    assert "0.60 (veil; 1 - 0.40, below chance), 0.51 (ppdl; too few trials)" in said


def gradients(*psnr):
    """Images rebuilt from plain gradients with these PSNRs, where a guess has 11 dB."""
    near = {"V-up": View(list(psnr), [0.5], [0.1], 1, 0.0, 0, 0.0, ["AA=="])}
    floors = {"mean image": Near([11.0], [0.1], [0.1])}
    return {"plain": Gradients(0, {"batch1-0": Batch(1, [0], Search(), near, floors, ["AA=="], (1, 1, 1))})}


def test_one_image_tells_nothing_about_gradients():
    assert gradients_verdict(gradients(30.0), 1).startswith("There are too few images to tell")
    assert gradients_verdict(gradients(5.0, 17.5), 1).startswith("There are too few images to tell")
    assert "30.0 dB (no defence)" in gradients_verdict(gradients(29.9, 30.0, 30.1), 1)


class Threshold(nn.Module):
    """Answers class 1 where the input is above the threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(threshold))

    def forward(self, inputs):
        return torch.cat([self.threshold.expand(len(inputs), 1), inputs], 1)


@pytest.mark.parametrize("threshold", [2.5, 6.5, 99.0])
def test_guessing_is_the_best_constant_answer(threshold):
    inputs, classes = torch.arange(10.0)[:, None], torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    data = Data("x", Part(inputs, classes), Part(inputs, classes), classes=("no", "yes"))
    model = Threshold(threshold)
    answers = model(inputs).argmax(1)
    best = [max(float((truth == constant).double().mean()) for constant in (0, 1)) for truth in (answers, classes)]
    assert guessing_of(model, data) == Guessing(*best)


def test_an_audit_of_an_imbalanced_file_guesses_its_most_frequent_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{(7 * number) % 100},{number % 10},{'yes' if number % 10 == 0 else 'no'}" for number in range(100)]
    (tmp_path / "calls.csv").write_text("\n".join(["a,b,answer", *rows]) + "\n")
    words = ["--data", "csv", "--path", "calls.csv", "--target", "answer", "--clients", "2", "--epochs", "2"]
    assert main(["train", *words, "--hidden", "4", "--defence", "plain", "--out", "run"]) == 0
    own = ["--trials", "2", "--shadows", "0", "--no-network", "--no-server", "--workers", "1"]
    capsys.readouterr()
    assert main(["audit", "run", *own]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("guessing"))
    config, federation = open_run("run")
    test = load_data(config).test
    answers = predict(federation.model, test.tensor).argmax(1)
    agreement, accuracy = (max(Counter(truth.tolist()).values()) / len(truth) for truth in (answers, test.targets))
    cells = re.split(r"\s{2,}", line)
    assert accuracy > 0.7
    assert [cells[1], cells[-1]] == [f"{100 * agreement:.1f}", f"{100 * accuracy:.1f}"]
