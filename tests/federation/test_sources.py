"""Records as users have them: every form trains the same model, and what cannot be trained on is refused."""

import numpy as np
import pandas
import pytest
import torch
from tests.oracle import built, worst
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from fedveil import Federation, errors
from fedveil.models import mlp


def pairs(classes=None, sizes=(20, 13)):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    if classes:
        return [(x, torch.randint(0, classes, (len(x),), generator=generator)) for x in inputs]
    return [(x, torch.randn(len(x), 4, generator=generator, dtype=torch.float64)) for x in inputs]


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained(clients, defence="plain", *, test=None, model=None, rounds=5, **options):
    model = model or built(lambda: mlp(6, 4, hidden=8))
    federation = Federation(model, clients, defence, lambda p: torch.optim.SGD(p, 0.1), **options)
    history = federation.fit(rounds=rounds, test=test)
    return values(model), history.last


class Lazily(Dataset):
    """Records that are made when they are read; counts them."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.read = inputs, targets, 0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        self.read += 1
        return self.inputs[row], self.targets[row]


FORMS = {
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "pandas": lambda x, y: (
        pandas.DataFrame(x.numpy()),
        pandas.Series(y.numpy()) if y.dim() == 1 else pandas.DataFrame(y.numpy()),
    ),
    "list": lambda x, y: [x, y],
    "classes as a list": lambda x, y: (x, y.tolist() if y.dim() == 1 else y),
    "TensorDataset": TensorDataset,
    "Dataset": Lazily,
    "Subset": lambda x, y: Subset(Lazily(x, y), range(len(y))),
    "DataLoader": lambda x, y: DataLoader(Lazily(x, y), batch_size=8, shuffle=True),
    "DataLoader in memory": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=8),
    "own collate": lambda x, y: DataLoader(
        Lazily(x, y),
        8,
        collate_fn=lambda items: (torch.stack([i for i, _ in items]), torch.stack([t for _, t in items])),
    ),
}


@pytest.mark.parametrize("classes", [None, 4], ids=["numbers", "classes"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_records_trains_the_model_that_tensors_train(form, classes):
    data = pairs(classes)
    clients = [FORMS[form](*pair) for pair in data]
    expected, measured = trained(data, test=data[0], batch_size=8)
    found, same = trained(clients, test=FORMS[form](*data[0]), batch_size=8)
    assert worst(found, expected) < 1e-12
    name = "accuracy" if classes else "mse"
    assert same[name] == pytest.approx(measured[name], abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"whole_shard": True}, {"participation": 0.5}])
def test_a_veiled_run_on_streams_is_the_plain_run_in_memory(options):
    data = pairs(4)
    expected, _ = trained(data, batch_size=8, **options)
    found, _ = trained([Lazily(*data[0]), data[1]], "veil", batch_size=8, **options)
    assert worst(found, expected) < 1e-9


def test_a_client_larger_than_memory_is_read_batch_by_batch():
    class Huge(Dataset):  # a million records of 8 MB each: 8 TB
        read = 0

        def __len__(self):
            return 10**6

        def __getitem__(self, row):
            Huge.read += 1
            return torch.full((1_000_000,), row / 1e6, dtype=torch.float64)[:6], row % 4

    federation = Federation(built(lambda: mlp(6, 4, hidden=8)), [Huge(), Huge()], "veil", batch_size=4)
    before = Huge.read
    federation.fit(rounds=3)
    assert Huge.read - before == 3 * 2 * 4
    assert before <= 10  # the form of the records, and the analysis of the model


def test_a_resumed_run_on_a_stream_goes_on_with_the_next_batch(tmp_path):
    data = pairs(4)
    sgd = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "batch_size": 8}
    whole = Federation(built(lambda: mlp(6, 4)), [Lazily(*pair) for pair in data], "plain", **sgd)
    whole.fit(rounds=6)
    first = Federation(built(lambda: mlp(6, 4)), [Lazily(*pair) for pair in data], "plain", **sgd)
    first.fit(rounds=4, folder=str(tmp_path))
    second = Federation(built(lambda: mlp(6, 4)), [Lazily(*pair) for pair in data], "plain", **sgd)
    second.resume(str(tmp_path))
    second.fit(rounds=6)
    assert all(
        torch.equal(a, b) for a, b in zip(values(second.model).values(), values(whole.model).values(), strict=True)
    )


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, a, b):
        return self.head(torch.relu(self.one(a) + self.other(b)))


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: ((x.numpy(), x.flip(1).numpy()), y.numpy()),
        lambda x, y: TensorDataset(x, x.flip(1), y),
        lambda x, y: DataLoader([(a, a.flip(0), t) for a, t in zip(x, y, strict=True)], batch_size=8),
        lambda x, y: ({"a": x.numpy(), "b": pandas.DataFrame(x.flip(1).numpy())}, y),
    ],
    ids=["arrays", "TensorDataset", "DataLoader", "dict"],
)
def test_models_with_several_inputs_take_them_in_every_form(form):
    data = pairs(4)
    expected, _ = trained([((x, x.flip(1)), y) for x, y in data], model=built(Two), batch_size=8)
    found, _ = trained([form(*pair) for pair in data], "veil", model=built(Two), batch_size=8, test=form(*data[0]))
    assert worst(found, expected) < 1e-9


def test_numbers_get_the_dtype_of_the_model():
    (x, y), *_ = pairs()
    federation = Federation(mlp(6, 4), [(x.numpy(), y.numpy())], "veil")
    assert federation.fit(1, test=(x.numpy(), y.numpy())).last["mse"] > 0
    assert federation.shards.inputs.dtype == federation.shards.targets.dtype == torch.float32


def test_columns_of_a_frame_are_features_and_one_column_of_classes_is_one_class_per_record():
    frame = pandas.DataFrame(np.arange(54).reshape(9, 6))
    federation = Federation(mlp(6, 4), [(frame, pandas.DataFrame({"y": np.arange(9) % 4}))], "plain")
    assert federation.loss.name == "cross_entropy"
    assert federation.shards.inputs.dtype == torch.float32
    numbers = Federation(mlp(6, 2), [(frame, pandas.DataFrame({"y": np.arange(9), "z": np.arange(9)}))], "plain")
    assert numbers.loss.name == "squared_error"


def test_the_batch_size_is_that_of_the_loaders_unless_one_is_given():
    loaders = [DataLoader(Lazily(*pair), batch_size=5) for pair in pairs()]
    assert Federation(built(lambda: mlp(6, 4)), loaders, "plain").shards.batch_size == 5
    assert Federation(built(lambda: mlp(6, 4)), loaders, "plain", batch_size=7).shards.batch_size == 7
    assert Federation(built(lambda: mlp(6, 4)), pairs(), "plain").shards.batch_size == 32
    with pytest.raises(errors.BadArgument, match="DataLoaders have batches of 3, 5"):
        Federation(built(lambda: mlp(6, 4)), [loaders[0], DataLoader(Lazily(*pairs()[0]), batch_size=3)])


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (4, torch.randn(20, 4), "squared_error"),
        (4, torch.arange(20) % 4, "cross_entropy"),
        (1, torch.arange(20) % 2, "binary_cross_entropy"),
        (1, torch.randn(20), "squared_error"),
    ],
)
def test_the_default_loss_suits_the_targets(outputs, targets, loss):
    federation = Federation(mlp(6, outputs), [(torch.randn(20, 6), targets)], "veil")
    assert federation.loss.name == loss
    federation.fit(rounds=1)


def test_whole_numbers_for_one_output_are_not_guessed_at():
    with pytest.raises(errors.BadArgument, match=r"(?s)classes or quantities\?\n.*binary_cross_entropy.*floating"):
        Federation(mlp(6, 1), [(torch.randn(20, 6), torch.arange(20))])


@pytest.mark.parametrize(
    ("model", "client", "options", "text"),
    [
        (mlp(6, 4), (torch.zeros(9, 5), torch.zeros(9, 4)), {}, r"does not take the clients' records .*shape \(5,\)"),
        (mlp(6, 4), (np.zeros((9, 6), np.uint8), torch.zeros(9, 4)), {}, r"torch.uint8 .*\n.*\.float\(\) for bytes"),
        (
            mlp(6, 4),
            (torch.zeros(9, 6), torch.arange(9) % 4 + 1),
            {},
            "client 0: targets: classes are from 1 to 4.*\n.*from 0 to 3",
        ),
        (mlp(6, 4), (torch.zeros(9, 6), torch.zeros(9, 1).long()), {}, r"(?s)shape is \(9, 1\).*Fix: targets\[:, 0\]"),
        (mlp(6, 4), (torch.zeros(9, 6), torch.zeros(8, 4)), {}, "9 inputs and 8 targets.*\n.*one target per record"),
        (mlp, (torch.zeros(9, 6), torch.zeros(9, 4)), {}, r"(?s)not a torch.nn.Module.*Net\(\), not Net"),
        (
            mlp(6, 4).requires_grad_(False),
            (torch.zeros(9, 6), torch.zeros(9, 4)),
            {},
            "no parameter of the model requires a gradient",
        ),
        (
            mlp(6, 4),
            (torch.zeros(9, 6), torch.zeros(9, 4)),
            {"loss": nn.CrossEntropyLoss},
            "CrossEntropyLoss is a class.*\n.*an object of it",
        ),
        (mlp(6, 4), (torch.zeros(9, 6), torch.zeros(9, 4)), {"defence": None}, 'defence is None.\n.*"plain" for none'),
        (
            mlp(6, 4),
            (torch.zeros(9, 6), torch.zeros(9).long()),
            {"loss": nn.CrossEntropyLoss()},
            "CrossEntropyLoss takes the mean itself.*\n.*loss='cross_entropy'",
        ),
    ],
)
def test_models_records_and_losses_that_do_not_fit_are_refused_at_once(model, client, options, text):
    with pytest.raises(errors.BadArgument, match=text):
        Federation(model, [client], **options)


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


class Odd(Lazily):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return self.item if row else (torch.zeros(6), 0)


ROWS = pandas.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (Endless(), "client 0: a Endless has no records by number"),
        (DataLoader(Endless()), "client 0: Endless has no length"),
        (torch.zeros(3, 6), "client 0: it is a Tensor"),
        (ROWS, "client 0: it is a DataFrame without targets"),
        ([(torch.zeros(6), 0)] * 3, "client 0: it is a list of 3"),
        (None, "client 0: it is a NoneType"),
        ((torch.zeros(9, 6), torch.zeros(9)), r"(?s)shape is \(9,\).*for classes, whole numbers: targets.long"),
        ((ROWS, [0, 1]), "client 0: inputs cannot become a tensor: column 'b'"),
        ((torch.zeros(2, 6), ["a", "b"]), "client 0: targets cannot become a tensor"),
        ((torch.zeros(3, 6), 1), "client 0: targets are one number, not one per record"),
        (TensorDataset(torch.zeros(3, 6)), "client 0: a TensorDataset of one tensor has no targets"),
        (Odd({"x": 1}), r"client 0: record 1 is a dict, not \(input, target\)"),
        (Odd((torch.zeros(5), 0)), "client 0: records 0, 1 do not make a batch"),
        (Odd((torch.full((6,), torch.nan), 0)), "client 0, record 1: inputs hold NaN or infinity"),
        (Lazily(torch.zeros(0, 6), torch.zeros(0)), "client 0 has no records"),
        (DataLoader(Lazily(*pairs()[0]), batch_size=None), "chooses its records by a"),
        (
            DataLoader(Lazily(*pairs()[0]), sampler=torch.utils.data.SubsetRandomSampler([0, 1])),
            "chooses its records by a SubsetRandomSampler of its own",
        ),
        (
            DataLoader(Lazily(*pairs()[0]), sampler=RandomSampler(range(20), replacement=True)),
            "chooses its records by a RandomSampler of its own",
        ),
    ],
)
def test_records_that_cannot_be_trained_on_are_refused(client, text):
    with pytest.raises(errors.BadArgument, match=text):
        Federation(built(lambda: mlp(6, 4)), [client], "plain").fit(rounds=2)


NO_TEST = r"test data has no records\.\n  Fix: give at least one test record, or leave out test=$"


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ((torch.zeros(0, 6), torch.zeros(0, 4)), NO_TEST),
        (
            (torch.zeros(3, 6), torch.zeros(2, 4)),
            "test data has 3 inputs and 2 targets: there must be as many targets as inputs",
        ),
        ((torch.full((3, 6), torch.inf), torch.zeros(3, 4)), "test data, record 0: inputs hold NaN or infinity"),
        (torch.zeros(3, 6), "test data: it is a Tensor"),
    ],
)
def test_test_data_that_cannot_be_used_are_refused_before_the_first_round(test, text):
    federation = Federation(built(lambda: mlp(6, 4)), pairs(), "plain")
    with pytest.raises(errors.BadArgument, match=text):
        federation.fit(test=test)
    assert federation.round == 0
