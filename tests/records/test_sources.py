"""Records in every form that users have train the same model; other objects are refused."""

import numpy as np
import pandas
import pytest
import torch
from tests.federation.test_local import values
from tests.forms import FORMS as INPUT_FORMS
from tests.forms import Apart, network, records
from tests.oracle import built, worst
from tests.small import Records
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from fedveil import Federation, audit, audit_model, errors
from fedveil.data import from_records
from fedveil.errors import BadArgument
from fedveil.models import mlp


def pairs(classes=None, sizes=(20, 13)):
    return records(sizes, classes)


def small_mlp():
    return built(lambda: mlp(6, 4, hidden=10))


def trained(clients, defence="plain", *, test=None, model=None, rounds=5, **options):
    model = model or small_mlp()
    federation = Federation(model, clients, defence, lambda p: torch.optim.SGD(p, 0.1), batch_size=8, **options)
    return values(model), federation.fit(rounds=rounds, test=test).last


def stack(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def frame(tensor):
    return pandas.Series(tensor.numpy()) if tensor.dim() == 1 else pandas.DataFrame(tensor.numpy())


FORMS = {
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "pandas": lambda x, y: (frame(x), frame(y)),
    "list": lambda x, y: [x, y],
    "classes as a list": lambda x, y: (x, y.tolist() if y.dim() == 1 else y),
    "TensorDataset": TensorDataset,
    "Dataset": Records,
    "Subset": lambda x, y: Subset(Records(x, y), range(len(y))),
    "DataLoader": lambda x, y: DataLoader(Records(x, y), batch_size=8, shuffle=True),
    "DataLoader in memory": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=8),
    "own collate": lambda x, y: DataLoader(Records(x, y), 8, collate_fn=stack),
}


@pytest.mark.parametrize("classes", [None, 4], ids=["numbers", "classes"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_records_trains_the_model_that_tensors_train(form, classes):
    data = pairs(classes)
    expected, measured = trained(data, test=data[0])
    found, same = trained([FORMS[form](*pair) for pair in data], test=FORMS[form](*data[0]))
    assert worst(found, expected) < 1e-12
    name = "accuracy" if classes else "mse"
    assert same[name] == pytest.approx(measured[name], abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"whole_shard": True}, {"participation": 0.5}])
def test_a_veiled_run_on_streams_is_the_plain_run_in_memory(options):
    data = pairs(4)
    expected, _ = trained(data, **options)
    found, _ = trained([Records(*data[0]), data[1]], "veil", **options)
    assert worst(found, expected) < 1e-9


def test_a_client_larger_than_memory_is_read_batch_by_batch():
    class Huge(Dataset):  # a million records of 8 MB each: 8 TB
        read = 0

        def __len__(self):
            return 10**6

        def __getitem__(self, row):
            Huge.read += 1
            return torch.full((1_000_000,), row / 1e6, dtype=torch.float64)[:6], row % 4

    federation = Federation(small_mlp(), [Huge(), Huge()], "veil", batch_size=4)
    before = Huge.read
    federation.fit(rounds=3)
    assert Huge.read - before == 3 * 2 * 4 + 4  # the comparison of gradients in the first round reads one more batch
    assert before <= 10  # the form of the records, and the analysis of the model


def test_a_resumed_run_on_a_stream_continues_with_the_next_batch(tmp_path):
    clients = [Records(*pair) for pair in pairs(4)]
    straight, first, second = [Federation(small_mlp(), clients, "plain", batch_size=8) for _ in range(3)]
    straight.fit(rounds=6)
    first.fit(rounds=4, folder=str(tmp_path))
    second.resume(str(tmp_path))
    second.fit(rounds=6)
    expected = values(straight.model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in values(second.model).items())


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b, y: ((a.numpy(), b.numpy()), y.numpy()),
        TensorDataset,
        lambda *columns: DataLoader(list(zip(*columns, strict=True)), batch_size=8),
        lambda a, b, y: ({"a": a.numpy(), "b": pandas.DataFrame(b.numpy())}, y),
    ],
    ids=["arrays", "TensorDataset", "DataLoader", "dict"],
)
def test_models_with_several_inputs_take_them_in_every_form(form):
    data = pairs(4)
    expected, _ = trained(data)
    given = [form(x[:, :2], x[:, 2:], y) for x, y in data]
    found, _ = trained(given, "veil", model=network(Apart), test=given[0])
    assert worst(dict(zip(expected, found.values(), strict=True)), expected) < 1e-9


def test_numbers_get_the_dtype_of_the_model_and_frames_hold_features():
    (x, y), *_ = pairs()
    federation = Federation(mlp(6, 4), [(x.numpy(), y.numpy())], "veil")
    assert federation.fit(1, test=(x.numpy(), y.numpy())).last["mse"] > 0
    assert federation.shards.inputs.dtype == federation.shards.targets.dtype == torch.float32
    table = pandas.DataFrame(np.arange(54).reshape(9, 6))
    classes = Federation(mlp(6, 4), [(table, pandas.DataFrame({"y": np.arange(9) % 4}))], "plain")
    assert (classes.loss.name, classes.shards.inputs.dtype) == ("cross_entropy", torch.float32)
    numbers = Federation(mlp(6, 2), [(table, pandas.DataFrame({"y": np.arange(9), "z": np.arange(9)}))], "plain")
    assert numbers.loss.name == "squared_error"


def test_the_batch_size_is_that_of_the_loaders_unless_one_is_given():
    loaders = [DataLoader(Records(*pair), batch_size=5) for pair in pairs()]
    assert Federation(small_mlp(), loaders, "plain").shards.batch_size == 5
    assert Federation(small_mlp(), loaders, "plain", batch_size=7).shards.batch_size == 7
    assert Federation(small_mlp(), pairs(), "plain").shards.batch_size == 32
    with pytest.raises(errors.BadArgument, match="DataLoaders have different batch sizes: 3, 5"):
        Federation(small_mlp(), [loaders[0], DataLoader(Records(*pairs()[0]), batch_size=3)])


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


def second(item):
    """Four records, all like the first but for their form."""
    return Records(items=[(torch.zeros(6), 0), item, item, item])


TABLE = pandas.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})
SPARSE = torch.eye(6).to_sparse()
LISTED = Records(*pairs()[0])


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (Endless(), "client 0: Endless has no length"),
        (DataLoader(Endless()), "client 0: Endless has no length"),
        (None, "client 0: NoneType has no length"),
        (torch.zeros(3, 6), "client 0: expected records and their targets, got a Tensor"),
        (TABLE, "client 0: expected records and their targets, got a DataFrame"),
        ([(torch.zeros(6), 0)] * 3, "client 0: .*, got a list of 3"),
        ((TABLE, [0, 1]), "client 0: inputs cannot be converted to a tensor: column 'b'"),
        (({"t": TABLE}, [0, 1]), r"client 0: inputs\['t'\] cannot be converted to a tensor: column 'b'"),
        ((torch.zeros(2, 6), ["a", "b"]), "client 0: targets cannot be converted to a tensor"),
        ((torch.zeros(3, 6), 1), "client 0: targets must have one value per record, got a single number"),
        ((torch.zeros(2, 6), [torch.zeros(3), torch.zeros(3)]), "targets is a list of tensors, .* several clients"),
        ((SPARSE, torch.arange(6) % 4), "client 0: inputs is a sparse, nested or meta tensor.\n.*to_dense"),
        ((torch.zeros(6, 6), SPARSE), "client 0: targets is a sparse, nested or meta tensor"),
        (
            Records(items=[(SPARSE[0], 0)] * 3),
            "client 0: cannot collate records 0, 1 into a batch .* sparse tensors are not",
        ),
        (({"x": torch.zeros(6, 6), "y": torch.zeros(6, 6, device="meta")}, torch.zeros(6)), r"inputs\['y'\] is a sp"),
        (TensorDataset(torch.zeros(3, 6)), "client 0: a TensorDataset of one tensor has no targets"),
        (second({"x": 1}), r"client 0, record 1: expected \(input, target\), got dict"),
        (
            second((torch.zeros(5), 0)),
            r"client 0, record 1: expected inputs to be .*6,\), as for record 0, got float of shape \(5,\)",
        ),
        (second(("text", 0)), "client 0, record 1: inputs cannot be converted to a tensor: got str"),
        (second((torch.full((6,), torch.nan), 0)), "client 0, record 1: found NaN or infinity in inputs"),
        (Records(torch.zeros(0, 6), torch.zeros(0)), "client 0: there are no records"),
        (DataLoader(LISTED, batch_size=None), "chooses its records with a"),
        (DataLoader(LISTED, sampler=torch.utils.data.SubsetRandomSampler([0, 1])), "with a SubsetRandomSampler, which"),
        (DataLoader(LISTED, sampler=RandomSampler(range(20), replacement=True)), "with a RandomSampler, which"),
        (DataLoader(LISTED, sampler=RandomSampler(LISTED, num_samples=2)), "with a RandomSampler, which"),
        (DataLoader(LISTED, batch_sampler=[[0, 1]]), "with a list, which"),
        (DataLoader(LISTED, collate_fn=len), "cannot collate records .* into a batch of inputs and targets"),
        (DataLoader(LISTED, collate_fn=lambda items: {"x": items}), "a dict has no targets: its keys are x"),
        (
            DataLoader(LISTED, collate_fn=lambda items: (items, 1)),
            "the last item of a batch is not a tensor of targets",
        ),
    ],
)
def test_records_that_cannot_be_trained_on_are_refused(client, text):
    with pytest.raises(errors.BadArgument, match=text):
        Federation(small_mlp(), [client], "plain").fit(rounds=2)


SWAPPED = "expected the columns a, b, as for {}, got b, a.\n  Fix: use the same columns in the same order: frame"


def test_held_out_frames_need_the_columns_of_the_training_frames():
    table = pandas.DataFrame(torch.randn(60, 2).numpy(), columns=["a", "b"])
    own, new = ((table[part], np.arange(30) % 2) for part in (slice(0, 30), slice(30, 60)))
    swapped, unnamed = (new[0][["b", "a"]], new[1]), (new[0].to_numpy(), new[1])
    run, clients = Federation(mlp(2, 2, hidden=4), [own], "plain"), SWAPPED.format("the clients")
    for name in ("test", "validation"):
        with pytest.raises(BadArgument, match=f"^{name} data: {clients}"):
            run.fit(rounds=1, **{name: swapped})
        with pytest.raises(BadArgument, match=f"^mine.{name}: {SWAPPED.format('mine.train')}"):
            from_records("mine", own, **({"test": new} | {name: swapped}))
    run.fit(rounds=1, test=new, validation=unnamed)  # the columns of an array are not known
    with pytest.raises(BadArgument, match=f"^test data: {clients}"):
        audit(run, swapped)
    with pytest.raises(BadArgument, match=f"^others: {SWAPPED.format('members')}"):
        audit_model(run.model, own, swapped)


def changed(number, change):
    """Two clients with dicts of two tensors, of which one is changed."""
    clients = [(INPUT_FORMS["dict"][1](inputs), targets) for inputs, targets in pairs(sizes=(4, 5))]
    clients[number] = change(clients[number][0]), clients[number][1]
    return clients


def with_value(place, value):
    def change(inputs):
        inputs["b"][place] = value
        return inputs

    return change


TENSOR = pairs(sizes=(4,))[0]
TUPLE = INPUT_FORMS["tuple"][1](TENSOR[0]), TENSOR[1]


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        (
            changed(1, lambda x: {"a": x["a"], "b": x["b"][:3]}),
            r"client 1: inputs\['b'\] has 3 records, but there are 5",
        ),
        (changed(0, lambda x: {**x, "b": torch.tensor(1.0)}), r"client 0: inputs\['b'\] has 0 records"),
        (
            changed(1, lambda x: {"a": x["a"]}),
            r"client 1: expected inputs\['b'\] to be float of shape .*, as for client 0, got missing",
        ),
        (
            changed(1, lambda x: {**x, "c": x["a"]}),
            r"client 1: expected inputs\['c'\] to be missing, as for client 0, got float",
        ),
        (
            changed(1, lambda x: {**x, "b": x["a"]}),
            r"client 1: expected inputs\['b'\] to be .*\(4,\), .* got float of shape \(2,\)",
        ),
        (
            changed(1, lambda x: {**x, "b": x["b"].long()}),
            r"client 1: expected inputs\['b'\] to be float of .* got integer of",
        ),
        (
            changed(1, lambda x: {**x, "b": None}),
            r"client 1: expected inputs\['b'\] to be float .*, as for client 0, got None",
        ),
        (changed(0, lambda x: {**x, "b": {1, 2}}), r"client 0: inputs\['b'\] is a set, not a tensor"),
        (changed(1, with_value((2, 1), torch.nan)), r"client 1, record 2: found NaN or infinity in inputs\['b'\]"),
        (changed(0, with_value((3, 0), torch.inf)), r"client 0, record 3: found NaN or infinity in inputs\['b'\]"),
        (changed(0, lambda x: {}), "client 0: inputs of type dict contain no tensor"),
        (changed(0, lambda x: 3), "client 0: inputs of type int contain no tensor"),
        ([TENSOR, TUPLE], "client 1: expected inputs to be float .*, as for client 0, got missing"),
        ([TUPLE, TENSOR], r"client 1: expected inputs\[0\] to be float .*, as for client 0, got missing"),
    ],
)
@pytest.mark.parametrize("classes", [False, True], ids=["numbers", "classes"])
def test_inputs_that_do_not_belong_together_are_named_before_the_model_is_called(clients, text, classes):
    if classes:  # for these Federation asks the model for the shape of its outputs
        clients = [(inputs, targets.argmax(1)) for inputs, targets in clients]
    with pytest.raises(BadArgument, match=text):
        Federation(network(Apart), clients, "plain")
