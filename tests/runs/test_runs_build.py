"""Models, federations and defences of a configuration."""

import pytest
import torch
from tests.configs import config_of

from fedveil.errors import BadArgument
from fedveil.runs.build import build_federation, build_model, load_data
from fedveil.runs.folder import train

SIGMOID = "tests.cli.test_inspection:sigmoid"


@pytest.mark.parametrize("model", ["mlp", "cnn", "lenet", "resnet8", SIGMOID])
def test_models_are_built_for_the_data_and_the_same_seed_gives_the_same_start(model):
    config = config_of(model=model, labels="5-9")
    data = load_data(config)
    first, second = build_model(config, data), build_model(config, data)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    if model != SIGMOID:
        assert first(data.test.inputs[:2]).shape == (2, 5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": "cnn", "data": "diabetes"}, "cnn takes images, but a record is a vector of 10 numbers"),
        ({"device": "cuda:7"}, "cannot use 'cuda:7'"),
        ({"model": SIGMOID}, r"the clients' records: .* does not accept these inputs"),  # three inputs, digits have 64
        ({"data": "my:data", "train_size": 3}, "--train-size applies only to the library's data sets"),
    ],
)
def test_what_cannot_be_built_is_refused_before_a_folder_is_made(values, text, tmp_path):
    with pytest.raises(BadArgument, match=text):
        train(config_of(**values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_clients_get_their_share_of_the_records():
    config = config_of(clients=3, split="dirichlet", alpha=1.0, defence="plain")
    federation = build_federation(config, load_data(config))
    assert sum(federation.shards.sizes) == 1438
    assert len(set(federation.shards.sizes)) == 3
