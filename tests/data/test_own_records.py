"""A user's own records: several tensors, whole numbers, targets at each position."""

from collections import UserDict

import numpy as np
import pytest
import torch
from tests.data.making import refused
from tests.data.test_loading import Items

from fedveil.data import Data, Part, from_datasets, from_tensors, keep_labels, split

IDS = torch.arange(12).reshape(4, 3)
MASK = torch.tensor([[True, False]] * 4)
LABELS = torch.tensor([0, 1, 1, 0])


def test_token_ids_stay_whole_and_numbers_become_single_precision():
    rows = [({"ids": IDS[k].int(), "mask": MASK[k], "age": 40.5 + k}, int(LABELS[k])) for k in range(4)]
    inputs, targets = from_datasets("mine", Items(*rows), Items(*rows)).train
    assert torch.equal(inputs["ids"], IDS)
    assert (inputs["ids"].dtype, inputs["mask"].dtype, inputs["age"].dtype) == (torch.int64, torch.bool, torch.float32)
    assert inputs["age"].tolist() == [40.5, 41.5, 42.5, 43.5]
    assert torch.equal(targets, LABELS)


def test_arguments_of_forward_are_tuples_of_what_items_hold():
    rows = [((IDS[k], np.full(2, k, dtype=np.float64)), 0.5) for k in range(4)]
    inputs, targets = from_datasets("mine", Items(*rows), Items(*rows)).train
    assert isinstance(inputs, tuple)
    assert torch.equal(inputs[0], IDS)
    assert inputs[1].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert targets.shape == (4, 1)


def test_a_single_tensor_of_token_ids_stays_whole_and_pixels_become_numbers():
    ids, pixels = (Items(*[(x[k], 0) for k in range(4)]) for x in (IDS, IDS.to(torch.uint8)))
    assert from_datasets("mine", ids, ids).train.tensor.dtype == torch.int64
    assert from_datasets("mine", pixels, pixels).train.tensor.dtype == torch.float32


def test_keys_in_another_order_are_the_same_record():
    rows = [({"ids": IDS[0], "age": 1.0}, 0), ({"age": 2.0, "ids": IDS[1]}, 1)]
    inputs, _ = from_datasets("mine", Items(*rows), Items(*rows)).train
    assert torch.equal(inputs["ids"], IDS[:2])


def test_targets_may_have_a_class_at_each_position():
    rows = [(torch.zeros(1, 2, 3), torch.tensor([[0, 1, 2], [2, 1, k]])) for k in range(4)]
    data = from_datasets("masks", Items(*rows), Items(*rows))
    assert (data.train.targets.shape, data.classes, data.outputs) == ((4, 2, 3), ("0", "1", "2", "3"), 4)


def test_tensors_in_memory_are_taken_as_they_are():
    pair = (IDS, torch.ones(4, 3, dtype=torch.float64)), LABELS
    data = from_tensors("mine", pair, pair, classes=["no", "yes"])
    assert repr(data) == "Data('mine', train=4, test=4, inputs[0] (3,), inputs[1] (3,), 2 classes)"
    assert data.train.inputs[1].dtype == torch.float32
    numbers = from_tensors("mine", (IDS, torch.ones(4)), (IDS, torch.ones(4)))
    assert (numbers.train.targets.shape, numbers.outputs, numbers.classes) == ((4, 1), 1, ())


def test_records_stay_together_when_some_are_taken():
    part = Part({"ids": IDS, "more": (IDS.float(),)}, LABELS)
    for rows in (torch.tensor([2, 0]), np.array([2, 0]), [2, 0]):
        taken = part.take(rows)
        assert taken.inputs["ids"].tolist() == taken.inputs["more"][0].tolist() == [[6, 7, 8], [0, 1, 2]]
        assert taken.targets.tolist() == [1, 0]


def test_kept_labels_and_shares_of_clients_go_through_the_form():
    pair = {"ids": IDS, "age": IDS[:, 0].float()}, LABELS
    data = from_tensors("mine", pair, pair)
    kept = keep_labels(data, [1])
    assert kept.train.inputs["ids"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert kept.train.inputs["age"].tolist() == [3, 6]
    assert sorted(torch.cat(split(data, 2)).tolist()) == [0, 1, 2, 3]


def test_classes_at_each_position_divide_no_records():
    pair = IDS.float(), IDS % 2
    data = from_tensors("masks", pair, pair)
    with refused("a Dirichlet split needs one class per record, and 'masks' has one at each position"):
        split(data, 2, how="dirichlet")
    with refused("records of 'masks' have a class at each position"):
        keep_labels(data, [1])


def test_what_wants_one_tensor_says_so():
    assert torch.equal(Part(IDS, LABELS).tensor, IDS)
    with refused("records are a dict of tensors, and this takes records of one tensor only"):
        _ = Part({"ids": IDS}, LABELS).tensor


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        ([({"ids": IDS[0]}, 0), ({"words": IDS[0]}, 0)], ["mine.train[1]: it has no input['ids'], unlike item 0"]),
        ([((IDS[0],), 0), ((IDS[0], IDS[1]), 0)], ["mine.train[1]: it has input[1], unlike item 0"]),
        ([((IDS[0],), 0), (IDS[0], 0)], ["mine.train[1]: it has input, unlike item 0"]),
        ([((IDS[0], IDS[0]), 0), ((IDS[0], IDS[0, :2]), 0)], ["mine.train[1]: input[1] is torch.int64 of shape (2,)"]),
        ([((IDS[0], torch.tensor([torch.nan])), 0)], ["mine.train[0]: it holds NaN"]),
        ([({"ids": "text"}, 0)], ["mine.train[0]: input['ids'] is str", "a transform that gives tensors"]),
        ([([1, 2, 3], 0)], ["mine.train[0]: input is list", "torch.tensor(input)"]),
        ([(UserDict(ids=IDS[0]), 0)], ["mine.train[0]: input is UserDict", "dict(input)"]),
        ([({}, 0)], ["mine.train[0]: input, a dict, is empty"]),
    ],
)
def test_items_of_other_forms_are_named(items, texts):
    with refused(*texts):
        from_datasets("mine", Items(*items), Items(*items))


@pytest.mark.parametrize(
    ("pair", "texts"),
    [
        (({"ids": IDS, "mask": MASK[:3]}, LABELS), ["mine.train: targets are", "for 3 inputs['mask']"]),
        (({"ids": IDS, "age": torch.full((4, 1), torch.inf)}, LABELS), ["mine.train: inputs['age'] hold NaN"]),
        (({"ids": IDS.to(torch.complex64)}, LABELS), ["mine.train: inputs['ids'] are torch.complex64"]),
        (({}, LABELS), ["mine.train: inputs, a dict, hold no tensor"]),
        ((IDS, [0, 1]), ["mine.train: targets are list"]),
        ((IDS, LABELS, LABELS), ["mine.train: it is tuple, not (inputs, targets)"]),
        (([IDS.float()], LABELS), ["mine.test: items are", "those of train are"]),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(pair, texts):
    with refused(*texts):
        from_tensors("mine", pair, (IDS, LABELS) if "mine.test" in texts[0] else pair)


def test_data_takes_every_form():
    part = Part({"ids": IDS, "age": torch.zeros(4)}, LABELS)
    assert Data("x", part, part, classes=("a", "b")).outputs == 2
    with refused("x.train: inputs['age'] are torch.float64"):
        Data("x", Part({"age": torch.zeros(4).double()}, LABELS), part, classes=("a", "b"))
