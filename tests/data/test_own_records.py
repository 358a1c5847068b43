"""A user's own records: several tensors, whole numbers, targets at each position."""

from collections import UserDict

import numpy as np
import pandas as pd
import pytest
import torch
from tests.data.making import refused
from tests.data.test_loading import Items
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from fedveil.data import Data, Part, from_datasets, from_parts, from_tensors, keep_labels, split

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
        ([({"ids": "text"}, 0)], ["mine.train[0]: input['ids'] cannot become a tensor: it is str"]),
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
        ((IDS, [0, 1]), ["mine.train: targets are torch.int64 of shape (2,) for 4 inputs"]),
        ((IDS, ["a", "b", "c", "d"]), ["mine.train: targets cannot become a tensor: [0] is 'a'"]),
        ((IDS, 3), ["mine.train: targets are one number"]),
        ((IDS, LABELS, LABELS), ["mine.train: it is tuple of 3, not (inputs, targets)"]),
        (IDS, ["mine.train: it is Tensor, not (inputs, targets)", "NumPy arrays or pandas frames"]),
        (([[1, 2], [3, 4]], LABELS), ["mine.train: inputs, a list, hold no tensor", "torch.tensor(inputs)"]),
        (({"x": np.array([[1, np.nan]] * 4)}, LABELS), ["mine.train: inputs['x'] hold NaN", "the first at [0, 1]"]),
        (
            (pd.DataFrame({"a": [1, 2, 3, 4], "b": list("wxyz")}), LABELS),
            ["mine.train: inputs cannot", "column 'b' has"],
        ),
        (({"t": pd.DataFrame({"a": [1, None, 3, 4]})}, LABELS), ["inputs['t'] cannot", "column 'a' has 1 missing"]),
        (([IDS.float()], LABELS), ["mine.test: items are", "those of train are"]),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(pair, texts):
    with refused(*texts):
        from_tensors("mine", pair, (IDS, LABELS) if "mine.test" in texts[0] else pair)


FRAME = pd.DataFrame({"age": [3, 4, 5, 6], "member": [True, False, True, False]}, index=[7, 5, 3, 1])
WANTED = [[3, 1], [4, 0], [5, 1], [6, 0]]


@pytest.mark.parametrize(
    "inputs",
    [
        FRAME,
        FRAME.astype({"age": "Int64", "member": "boolean"}),
        FRAME.to_numpy(dtype=np.float16),
        FRAME.to_numpy(dtype=">f8")[::-1][::-1],
    ],
)
@pytest.mark.parametrize(
    "targets", [LABELS, LABELS.numpy(), pd.Series(LABELS.tolist(), index=FRAME.index), [0, 1, 1, 0]]
)
def test_arrays_and_frames_are_tables_of_numbers(inputs, targets):
    found = from_tensors("mine", (inputs, targets), (inputs, targets))
    assert found.train.tensor.dtype == torch.float32
    assert found.train.tensor.tolist() == WANTED
    assert (found.train.targets.tolist(), found.classes) == ([0, 1, 1, 0], ("0", "1"))


def test_whole_numbers_of_arrays_stay_whole_and_those_of_frames_are_features():
    arrays, frames = ((x, LABELS) for x in (IDS.numpy(), pd.DataFrame(IDS.numpy())))
    assert from_tensors("mine", arrays, arrays).train.tensor.dtype == torch.int64
    assert from_tensors("mine", frames, frames).train.tensor.dtype == torch.float32


def test_targets_of_frames_are_one_class_or_several_numbers():
    one, two = pd.DataFrame({"y": [0, 1, 1, 0]}), pd.DataFrame({"y": [0, 1, 1, 0], "z": [1, 2, 3, 4]})
    assert from_tensors("mine", (FRAME, one), (FRAME, one)).classes == ("0", "1")
    several = from_tensors("mine", (FRAME, two), (FRAME, two))
    assert (several.classes, several.outputs, several.train.targets.dtype) == ((), 2, torch.float32)


def test_floating_targets_that_look_like_classes_are_a_regression_that_says_so():
    pair = FRAME, LABELS.double().numpy()
    found = from_tensors("mine", pair, pair)
    assert (found.classes, found.outputs) == ((), 1)
    assert found.notes == (
        "targets are floating numbers, of 2 different whole values: taken as a regression; "
        "give them as int64 if they are classes",
    )
    for targets in (LABELS, torch.tensor([0.5, 1, 2, 3]), torch.arange(8.0).reshape(4, 2)):
        assert from_tensors("mine", (FRAME, targets), (FRAME, targets)).notes == ()


def test_one_column_is_one_feature():
    pair = FRAME["age"], LABELS
    assert from_tensors("mine", pair, pair).train.tensor.tolist() == [[3], [4], [5], [6]]


def test_the_users_array_is_not_changed():
    array = np.ones((4, 2), dtype=np.float32)
    found = from_tensors("mine", (array, LABELS), (array, LABELS))
    assert found.train.tensor.data_ptr() == array.ctypes.data  # no copy where none is needed
    assert np.array_equal(array, np.ones((4, 2)))


def test_the_last_of_several_is_the_target():
    rows = Items(*[(IDS[k], float(k), int(LABELS[k])) for k in range(4)])
    for given in (rows, DataLoader(rows, 2), TensorDataset(IDS, torch.arange(4.0), LABELS)):
        inputs, targets = from_datasets("mine", given, given).train
        assert isinstance(inputs, tuple)
        assert (inputs[0].tolist(), inputs[1].tolist()) == (IDS.tolist(), [0, 1, 2, 3])
        assert targets.tolist() == LABELS.tolist()


def padded(items):
    return pad_sequence([item[0] for item in items], batch_first=True), torch.tensor([item[1] for item in items])


@pytest.mark.parametrize("how", [{"batch_size": 3}, {"batch_size": 2, "shuffle": True, "drop_last": True}])
def test_a_loader_gives_every_record_once_put_together_by_its_own_function(how):
    rows = Items(*[(torch.arange(k + 1), k % 2) for k in range(4)])
    loader = DataLoader(rows, collate_fn=padded, **how)
    found = from_datasets("mine", loader, loader)
    assert found.train.tensor.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert found.train.targets.tolist() == [0, 1, 0, 1]


PAIRS = TensorDataset(IDS.float(), LABELS)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(PAIRS)


@pytest.mark.parametrize(
    ("loader", "texts"),
    [
        (DataLoader(PAIRS, sampler=SubsetRandomSampler([0, 1])), ["by a SubsetRandomSampler of its own", "Subset(dat"]),
        (DataLoader(PAIRS, sampler=RandomSampler(PAIRS, replacement=True)), ["by a RandomSampler of its own"]),
        (DataLoader(PAIRS, sampler=RandomSampler(PAIRS, num_samples=2)), ["by a RandomSampler of its own"]),
        (DataLoader(PAIRS, batch_sampler=[[0, 1]]), ["by a list of its own"]),
        (DataLoader(Stream()), ["Stream has no length", "__getitem__"]),
        (DataLoader(PAIRS, collate_fn=len), ["collate_fn gave int, not (inputs, targets)"]),
        (DataLoader(PAIRS, collate_fn=lambda items: {"x": items}), ["collate_fn gave dict"]),
    ],
)
def test_loaders_that_give_something_else_than_their_records_are_refused(loader, texts):
    with refused("mine.train: ", *texts):
        from_datasets("mine", loader, PAIRS)


def test_each_part_may_have_a_form_of_its_own():
    array = IDS.numpy().astype(np.float64), LABELS.numpy()
    wanted = from_datasets("mine", PAIRS, PAIRS)
    for train, test in ((array, PAIRS), (DataLoader(PAIRS), array), (Items(*PAIRS), [IDS.float(), LABELS])):
        found = from_parts("mine", train, test)
        assert torch.equal(found.train.tensor, wanted.train.tensor)
        assert torch.equal(found.test.tensor, wanted.test.tensor)


@pytest.mark.parametrize("odd", [IDS, IDS.numpy(), FRAME, {"x": IDS}, "file.csv", None, 3])
def test_what_is_no_part_says_what_would_do(odd):
    with refused(f"mine.test: it is {type(odd).__name__}, not (inputs, targets) and no Dataset", "or a DataLoader"):
        from_parts("mine", PAIRS, odd)


def test_data_takes_every_form():
    part = Part({"ids": IDS, "age": torch.zeros(4)}, LABELS)
    assert Data("x", part, part, classes=("a", "b")).outputs == 2
    with refused("x.train: inputs['age'] are torch.float64"):
        Data("x", Part({"age": torch.zeros(4).double()}, LABELS), part, classes=("a", "b"))
