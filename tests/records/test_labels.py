"""Dicts with "labels" inside are records: in memory, in a Dataset, and from a collate_fn that pads."""

import copy

import pytest
import torch
from tests.users import Encoder, Encoding, Sentences, batch, pad
from torch.utils.data import DataLoader

from fedveil import Federation
from fedveil.errors import BadArgument
from fedveil.records.sources import LABEL_NAMES, as_source, check_sources


def trained(net, clients, defence="plain", **options):
    run = Federation(copy.deepcopy(net), clients, defence, loss="cross_entropy", batch_size=4, **options)
    run.fit(rounds=3)
    return torch.nn.utils.parameters_to_vector(run.model.parameters())


@pytest.mark.parametrize("label", LABEL_NAMES)
def test_every_form_of_the_same_records_trains_the_same_model(label):
    data = Sentences(8, label=label, length=4)
    ids, classes = (torch.tensor([item[name] for item in data.items]) for name in ("input_ids", label))
    forms = [
        ({"input_ids": ids}, classes),
        (Encoding(input_ids=ids), classes.numpy()),
        {"input_ids": ids, label: classes},
        Encoding({"input_ids": ids.numpy(), label: classes}),
        data,
        DataLoader(data),
    ]
    net = Encoder().double()
    found = [trained(net, [form]) for form in forms]
    assert all(torch.equal(found[0], own) for own in found[1:])


def test_a_veil_trains_like_plain_with_padding_that_varies():
    clients = [DataLoader(Sentences(9 + k, k), batch_size=4, collate_fn=pad) for k in range(3)]
    widths = {batch["input_ids"].shape[1] for client in clients for batch in client}
    assert len(widths) > 1
    net = Encoder(lambda y, h: {"logits": y}).double()
    assert (trained(net, clients) - trained(net, clients, "veil")).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([{"input_ids": [1, 2]}], 'no targets: its keys are input_ids.*name the targets "labels"'),
        ([{"input_ids": [1, 2], "label": 0, "labels": 0}], "several targets"),
        ([{"text": "hello", "label": 0}], "text"),
        ([{"input_ids": [1, 2], "label": 0}, {"input_ids": [1], "label": 0}], "record 1: expected inputs"),
    ],
)
def test_other_dicts_are_refused(items, text):
    data = Sentences(len(items))
    data.items = items
    with pytest.raises(BadArgument, match=f"(?s){text}"):
        check_sources([as_source("client 0", data)])


def first_tokens(items):
    ids, classes = zip(*[(item["input_ids"][0], item["label"]) for item in items], strict=True)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(classes)}


def test_padded_batches_of_clients_may_differ_in_length_but_not_in_form():
    short, long = (DataLoader(Sentences(4, length=own), collate_fn=pad) for own in (2, 6))
    assert len(check_sources([as_source("a", short), as_source("b", long)])) == 2
    flat = DataLoader(Sentences(4), collate_fn=first_tokens)
    with pytest.raises(BadArgument, match="b: expected inputs"):
        check_sources([as_source("a", short), as_source("b", flat)])


def test_a_mapping_without_labels_is_not_records():
    with pytest.raises(BadArgument, match=r"expected records and their targets, got a .*Encoding"):
        as_source("client 0", batch())
