"""Over a network, one record affects neither the form of the others nor whether their client takes part."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from tests.federation.secured import POLICY, net, parts
from tests.federation.test_record_sums import PRIVATE, clear_server, exact_sum, flat, transcript
from torch import nn

from fedveil import Privacy
from fedveil.errors import BadArgument
from fedveil.federation.client import ClientSession
from fedveil.federation.record_sums import RecordRound
from fedveil.federation.sums import Sums
from fedveil.secagg import exponent
from fedveil.secagg.messages import HEAD_WORDS


class WholeNumbers(nn.Module):
    """A model of whole numbers that float32 cannot represent."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        with torch.no_grad():
            self.lin.weight.copy_(torch.eye(2, 3))

    def forward(self, x):
        return self.lin((x % 5).float())


class Masked(nn.Module):
    """A model whose operation on a mask depends on its dtype."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x, mask):
        return self.lin(x.masked_fill(~mask, 0.0))


def numbers(changed):
    draw = torch.Generator().manual_seed(0)
    items = [(torch.randint(2**24, 2**26, (3,), generator=draw), k % 2) for k in range(40)]
    if changed:
        items[7] = torch.tensor([0.5, 1.0, 2.0]), 1
    return items


def masks(changed):
    draw = torch.Generator().manual_seed(0)
    items = [
        {"x": torch.rand(3, generator=draw), "mask": torch.rand(3, generator=draw) > 0.3, "labels": k % 2}
        for k in range(40)
    ]
    if changed:
        items[7]["mask"] = items[7]["mask"].long()
    return items


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize(
    ("build", "items", "example"),
    [
        (WholeNumbers, numbers, torch.ones(2, 3).long()),
        (Masked, masks, {"x": torch.ones(2, 3), "mask": torch.ones(2, 3).bool()}),
    ],
    ids=["numbers", "masks"],
)
def test_a_record_of_another_dtype_does_not_change_the_dtype_of_others(build, items, example):
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        data = [Items(items(changed and not k)) for k in range(5)]
        found.append(exact_sum(build, "cross_entropy", data, example))
    assert float((found[0] - found[1]).norm()) <= 2.0 + 1e-3  # clipped to 1 each
    assert bool(found[0].any())


def spoil_input(data):
    data[0][0][3, 0] = math.nan


def spoil_class(data):
    data[0][1][3] = 99  # the model has four outputs


@pytest.mark.parametrize("spoil", [spoil_input, spoil_class])
def test_without_secure_aggregation_a_bad_record_is_left_out_alone(spoil):
    """Otherwise, its client would be missing from the sum, although the server adds noise only for one record."""
    quiet, found = Privacy(noise=0.0, rate=1.0, clip=0.1), []
    for change in (lambda data: None, spoil):
        change(data := parts())
        server = clear_server("plain", quiet)
        server.engine.transport.answers |= {"site-0": ClientSession(net(), data[0], client=0).reply}
        result = server.exchange()
        assert result.figures["answers"] == 5
        found.append(flat(result.gradients) * result.figures["records"])
    rounding = 5 * quiet.grid(len(found[0]), 1, None).unit * math.sqrt(len(found[0]))
    assert 0 < float((found[0] - found[1]).norm()) <= 0.1 + rounding


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def regressor():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def frames(row, column, cell):
    """Five frames whose labels are integers; one cell of the first is replaced, in column 3 the label."""
    draw, found = np.random.default_rng(0), []
    for k in range(5):
        whole = pd.DataFrame(draw.random((40, 3)), columns=list("abc"))
        whole["label"] = np.arange(40) % 10 // 9  # mostly one class, so that gradients do not cancel
        columns = [whole[name] for name in whole]
        if k == 0 and cell is not None:
            values = columns[column].tolist()
            values[row] = cell
            columns[column] = pd.Series(values, name=columns[column].name)
        whole = pd.concat(columns, axis=1)
        found.append((whole[list("abc")], whole["label"]))
    return found


@pytest.mark.parametrize("cell", [math.nan, "unknown", 0.5])
@pytest.mark.parametrize("column", [1, 3])
def test_one_cell_of_a_frame_affects_only_its_own_record(column, cell):
    """pandas gives a column of integers another dtype if one of them is missing, a fraction or text."""
    example = torch.ones(2, 3).double()
    found = [exact_sum(classifier, "cross_entropy", frames(7, column, own), example) for own in (None, cell)]
    assert 0 < float((found[0] - found[1]).norm()) <= 2.0 + 1e-3


@pytest.mark.parametrize("cell", [math.nan, "unknown", 0.5])
def test_quantities_that_happen_to_be_integers_are_quantities(cell):
    found = [
        exact_sum(regressor, "squared_error", frames(7, 3, own), torch.ones(2, 3).double()) for own in (None, cell)
    ]
    assert 0 < float((found[0] - found[1]).norm()) <= 2.0 + 1e-3
    assert float(found[0].norm()) > 20.0  # otherwise, all records would be left out


class Panic(BaseException):
    """Raised by extensions in Rust, which does not derive from Exception."""


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(3, 2).double()

    def forward(self, x):
        if bool((x > 50).any()):
            raise Panic
        return self.lin(x)


class Corrupt(torch.utils.data.Dataset):
    def __init__(self, records, row):
        self.records, self.row = records, row

    def __len__(self):
        return len(self.records[0])

    def __getitem__(self, index):
        if index == self.row:
            raise Panic
        return self.records[0][index], self.records[1][index]


def vectors(largest=1.0):
    draw, found = torch.Generator().manual_seed(0), []
    for k in range(5):
        inputs = torch.rand(40, 3, generator=draw).double()
        inputs[7] = inputs[7] * (1.0 if k else largest)
        found.append((inputs, torch.arange(40) % 10 // 9))  # mostly one class, so that gradients do not cancel
    return found


def corrupt(row):
    return [Corrupt(own, None if k else row) for k, own in enumerate(vectors())]


@pytest.mark.parametrize(
    ("build", "data"),
    [(Fails, (vectors(), vectors(1e4))), (classifier, (corrupt(None), corrupt(7)))],
    ids=["forward", "dataset"],
)
def test_a_record_that_raises_what_is_not_an_exception_is_left_out_alone(build, data):
    found = [exact_sum(build, "cross_entropy", own, torch.ones(2, 3).double()) for own in data]
    assert 0 < float((found[0] - found[1]).norm()) <= 1.0 + 1e-3


class Remembers(nn.Module):
    """After a large record, the sign of all outputs is different; it is kept in `how`."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.how = nn.Linear(3, 2).double(), how
        self.sign, self.seen, self.flips = 1.0, [], torch.zeros(())

    def forward(self, x):
        if bool((x > 50).any()):
            if self.how == "number":
                self.sign = -1.0
            elif self.how == "list":
                self.seen.append(1)
            elif self.how == "tensor":
                self.flips += 1
            else:
                self.new = True
        flipped = self.sign < 0 or self.seen or self.flips > 0 or hasattr(self, "new")
        return self.lin(x) * (-100 if flipped else 100)


@pytest.mark.parametrize("how", ["number", "list", "tensor", "new"])
def test_a_module_that_remembers_a_record_forgets_it_before_the_next(how):
    build = partial(Remembers, how)
    found = [exact_sum(build, "cross_entropy", vectors(own), torch.ones(2, 3).double()) for own in (1.0, 1e4)]
    assert float((found[0] - found[1]).norm()) <= 2.0 + 1e-3
    assert bool(found[0].any())


def choose_exponents_by_data(monkeypatch):
    """Plant an error: the exponents of a round come from the exact sum of the last round."""
    layout, aggregate, sizes = Sums.layout, Sums.aggregate, [1.0]

    def measure(self, defence_round, total, opening):
        sizes[0] = float(np.abs(total[HEAD_WORDS:].view(np.int64)).max())
        return aggregate(self, defence_round, total, opening)

    def choose(self, defence_round, clients):
        exponents, rows, checks = layout(self, defence_round, clients)
        return (exponent(sizes[0]),) * len(exponents), rows, checks

    monkeypatch.setattr(Sums, "aggregate", measure)
    monkeypatch.setattr(Sums, "layout", choose)
    monkeypatch.setattr(RecordRound, "check_format", lambda *_: None)  # otherwise, clients refuse


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_no_message_but_the_noisy_model_depends_on_a_record_if_the_server_adds_the_noise(
    planted, tmp_path, monkeypatch
):
    """All gradients are 0, apart from that of one record in one of two data sets. The server knows the exact sum."""
    if planted:
        choose_exponents_by_data(monkeypatch)
    privacy, found = replace(PRIVATE, noise_by="server", rate=1.0, vanishing=0), []
    for error in (0.0, 1e6):
        data = [(inputs, net()(inputs).detach()) for inputs, _ in parts()]
        data[0][1][0] += error
        found.append(transcript(data, tmp_path, privacy))
    assert len(found[0][1]) == 15
    assert (found[0] == found[1]) is not planted


@pytest.mark.parametrize("name", ["noise", "clip", "rate"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, None, True, "1", 10**400])
def test_terms_that_are_no_numbers_are_refused_before_the_ledger_is_charged(name, value):
    with pytest.raises(BadArgument, match="rivacy"):
        RecordRound.from_terms({**PRIVATE.terms(), name: value}, POLICY)
