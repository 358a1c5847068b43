"""The audit of any model finds members that it memorised, and nothing where it never saw them."""

import dataclasses
import math

import numpy as np
import pandas
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from tests.attacks.victims import memorise, records
from torch import nn
from torch.utils.data import TensorDataset

import fedveil
from fedveil.errors import BadArgument
from fedveil.studies.model_audit.exposure import ScoredMembers, benjamini_hochberg, count_above, rank_exposures
from fedveil.studies.model_audit.records import read_records
from fedveil.studies.verdicts import Label

COUNT = 200
ATTACKS = {"loss", "loss by class", "white-box network"}


@pytest.fixture(scope="module")
def pool():
    """Members and others whose labels are random: a model can only memorise them."""
    inputs, targets = records(2 * COUNT, seed=1)
    return (inputs[:COUNT], targets[:COUNT]), (inputs[COUNT:], targets[COUNT:])


def train(batch):
    return memorise(*batch, seed=5)


def test_a_model_that_memorised_random_labels_is_found_and_its_members_stand_out(pool):
    members, others = pool
    found = fedveil.audit_model(memorise(*members), members, others, loss="squared_error", train=train, shadows=8)
    assert found.label is Label.LEAK
    assert set(found.attacks) == ATTACKS | {"RMIA", "LiRA"}
    assert all(one.auc.low > 0.9 for name, one in found.attacks.items() if name != "white-box network")
    assert len(found.standing_out) > 0.9 * COUNT
    assert [one.rank for one in found.exposures] == list(range(1, COUNT + 1))
    assert sorted(one.record for one in found.exposures) == list(range(COUNT))
    assert found.left_out == {}
    said = repr(found)
    assert said.startswith("The model reveals which records it was trained on. Of 200 members, ")
    assert "AUC" in said


def test_a_model_that_never_saw_the_members_gives_no_finding(pool):
    members, others = pool
    found = fedveil.audit_model(memorise(*records(COUNT, seed=3)), members, others, loss="squared_error")
    assert found.label is not Label.LEAK
    assert found.standing_out == ()
    assert found.left_out == dict.fromkeys(("RMIA", "LiRA"), "no function to train shadows was given")
    if found.label is Label.TOO_FEW:
        assert found.verdict.trials_needed > COUNT
        assert "would be enough" in repr(found)


def test_records_that_a_model_remembers_stand_out_among_those_that_it_does_not(pool):
    members, others = pool
    kept = slice(0, COUNT, 4)  # the model was trained on every fourth member, and on other records
    inputs, targets = records(COUNT, seed=9)
    model = memorise(torch.cat([members[0][kept], inputs]), torch.cat([members[1][kept], targets]))
    found = fedveil.audit_model(model, members, others, loss="squared_error", network=False)
    assert found.label is Label.LEAK
    assert found.verdict.label is not Label.LEAK  # the AUC is near guessing, because most members were not used
    assert repr(found).startswith("The model reveals some of the records that it was trained on. Of 200 members, ")
    named = [one.record for one in found.standing_out]
    used = sum(record % 4 == 0 for record in named)
    assert used > COUNT / 8
    assert len(named) - used <= 0.05 * len(named) + 3 * math.sqrt(0.05 * len(named))


def train_regression(batch, steps=400):
    inputs, targets = batch
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()
    return net


def test_quantities_of_scikit_learn_and_ones_own_training_loop():
    data = load_diabetes(scaled=True)
    inputs, targets = data.data * 20, (data.target - data.target.mean()) / data.target.std()
    members, others = (inputs[:100], targets[:100]), (inputs[100:300], targets[100:300])
    model = train_regression((torch.tensor(members[0]).float(), torch.tensor(members[1]).float()[:, None]))
    found = fedveil.audit_model(model, members, others, train=train_regression, shadows=2)
    assert found.loss == "squared_error"
    assert set(found.attacks) == {"loss", "white-box network", "RMIA"}
    assert found.left_out == {"LiRA": "it needs at least 8 shadows"}
    assert found.label is Label.LEAK
    assert found.on_members["mse"] < found.on_others["mse"]


def test_frames_datasets_and_arrays_of_classes_give_the_same_audit(tmp_path):
    inputs, targets = load_digits(return_X_y=True)
    inputs, torch_inputs = (inputs / 16).astype("float32"), torch.tensor(inputs / 16).float()
    model = nn.Linear(64, 10)
    forms = [
        [(inputs[rows], targets[rows]) for rows in (slice(60), slice(60, 140))],
        [(pandas.DataFrame(inputs[rows]), pandas.Series(targets[rows])) for rows in (slice(60), slice(60, 140))],
        [TensorDataset(torch_inputs[rows], torch.tensor(targets[rows])) for rows in (slice(60), slice(60, 140))],
    ]
    first, *more = (fedveil.audit_model(model, *both, network=False) for both in forms)
    assert first.loss == "cross_entropy"
    for other in more:
        assert other.exposures == first.exposures
        assert repr(other) == repr(first)
    frame = first.to_frame()
    assert list(frame["rank"]) == list(range(1, 61))
    assert (frame.low <= frame.false_positives).all()
    assert (frame.false_positives <= frame.high).all()
    page = first.page(tmp_path / "audit.html").read_text()
    assert "Most exposed records" in page
    assert first.verdict.label in page
    assert first.sentence in page


def test_a_dict_of_inputs_is_attacked_without_a_network():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, left, right):
            return self.head(torch.cat([left, right], 1))

    parts = [({"left": torch.randn(40, 2), "right": torch.randn(40, 2)}, torch.randint(3, (40,))) for _ in range(2)]
    found = fedveil.audit_model(Two(), *parts)
    assert set(found.attacks) == {"loss", "loss by class"}
    assert found.left_out["white-box network"] == "each record has several tensors"


def test_the_halves_are_disjoint_and_exchange_roles(pool):
    found = read_records(nn.Linear(1, 1), *pool, 0)
    first, second = found.fold(0), found.fold(1)
    assert sorted(np.concatenate(first.parts)) == list(range(2 * COUNT))
    for name, other in (("known_members", "test_members"), ("known_nonmembers", "test_nonmembers")):
        assert np.array_equal(getattr(first, name), getattr(second, other))
        assert np.array_equal(getattr(first, other), getattr(second, name))
    assert max(first.known_members.max(), first.test_members.max()) < COUNT
    assert min(first.known_nonmembers.min(), first.test_nonmembers.min()) >= COUNT


def test_p_values_of_records_that_are_not_remembered_are_at_most_alpha_with_probability_alpha():
    chance, rejected, wrong, trials = np.random.default_rng(0), 0, [], 300
    for _ in range(trials):
        scores, others = chance.normal(size=40), chance.normal(size=99)
        scores[:10] += 8  # these are remembered
        found = rank_exposures([ScoredMembers(np.arange(40), scores, others, "x")])
        p = {one.record: one.p for one in found}
        rejected += sum(p[record] <= 0.05 for record in range(10, 40)) / 30 / trials
        named = [one.record for one in found if one.stands_out]
        wrong.append(sum(record >= 10 for record in named) / max(1, len(named)))
        assert set(range(10)) <= set(named)
    assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100 / trials) * math.sqrt(1 + 30 / 99)
    assert np.mean(wrong) <= 0.05 + 3 * np.std(wrong) / math.sqrt(trials)


def test_benjamini_hochberg_and_the_number_of_others_above():
    p = np.array([0.01, 0.04, 0.03, 0.2, 0.5])  # limits: 0.01, 0.02, 0.03, 0.04, 0.05
    assert benjamini_hochberg(p, 0.05).tolist() == [True, False, False, False, False]
    assert benjamini_hochberg(np.array([0.021, 0.04, 0.029, 0.03]), 0.05).tolist() == [True, True, True, True]
    assert not benjamini_hochberg(np.array([0.9, 0.6]), 0.05).any()
    assert count_above(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 3.0])).tolist() == [3, 3, 1]


def few(count):
    return torch.randn(count, 4), torch.randint(3, (count,))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda given: {"members": few(5)}, "there are only 5 members"),
        (lambda given: {"others": few(19)}, "there are only 19 others"),
        (lambda given: {"others": tuple(map(torch.cat, zip(given["others"], given["members"], strict=True)))},
         "40 of the 80 others are also members; record 40, for example, equals member 0"),
        (lambda given: {"others": (torch.randn(40, 5), torch.randint(3, (40,)))}, "expected inputs to be float of"),
        (lambda given: {"model": nn.Linear(7, 3)}, "the model does not accept"),
        (lambda given: {"model": nn.Linear}, "the model is a type, not a module"),
        (lambda given: {"model": nn.Linear(4, 2)}, "classes range from 0 to 2"),
        (lambda given: {"model": nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))}, "one row of outputs per"),
        (lambda given: {"loss": fedveil.BatchLoss(nn.CrossEntropyLoss())}, "one value for a batch"),
        (lambda given: {"train": lambda batch: batch}, "train returned tuple, not a torch.nn.Module"),
        (lambda given: {"train": lambda batch: nn.Linear(4, 5)}, "a shadow has 5 outputs, but the model has 3"),
        (lambda given: {"train": lambda batch: nn.Linear(4, 3), "shadows": 3}, "must be even, got 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_audited_is_refused(change, why):
    given = {"model": nn.Linear(4, 3), "members": few(40), "others": few(40), "network": False}
    given |= {"loss": "cross_entropy"} | change(given)
    with pytest.raises(BadArgument, match=why):
        fedveil.audit_model(given.pop("model"), given.pop("members"), given.pop("others"), **given)


def test_a_model_with_values_that_are_not_finite_is_refused():
    model = nn.Linear(4, 3)
    model.weight.data.fill_(math.nan)
    with pytest.raises(BadArgument, match="an output of the model is not finite"):
        fedveil.audit_model(model, few(40), few(40), network=False)


def test_the_result_is_frozen_and_the_model_is_unchanged():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    model.train()
    before = [value.clone() for value in model.state_dict().values()]
    found = fedveil.audit_model(model, few(40), few(40), network=False)
    assert model.training
    assert all(map(torch.equal, before, model.state_dict().values()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.attack = "other"
