"""Configurations from keys, sections and files: what is the same, what is refused, and the default loss."""

from typing import get_args

import pytest
from tests.configs import config_of

from fedveil.errors import BadArgument
from fedveil.runs.build import choose_loss, load_data
from fedveil.runs.choices import format_command
from fedveil.runs.folder import read_config
from fedveil.runs.settings import SECTIONS, LossName, configure, read_file
from fedveil.scheme import LOSSES


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"epoch": 3}, "there is no key 'epoch'.\n  Fix: use 'epochs' in [training]"),
        ({"qqq": 3}, "use one of data, path"),
        ({"epochs": "many"}, "epochs must be a valid integer, got 'many'"),
        ({"loss": "squared"}, "loss must be 'absolute_error', 'binary_cross_entropy'"),
        ({"lr": -1.0}, "lr must be greater than 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"trainng": {"lr": 1.0}}, "there is no section [trainng].\n  Fix: use [training]"),
        ({"data": {"lr": 1.0}}, "'lr' is in section [data].\n  Fix: move it to [training]"),
        ({"lr": 1.0, "training": {"lr": 2.0}}, "'lr' is given twice.\n  Fix: keep the one in [training]"),
        ({"label_smoothing": 0.1, "loss": "squared_error"}, "label_smoothing does not apply to squared_error"),
    ],
)
def test_bad_values_are_refused_with_the_nearest_good_one(values, text):
    with pytest.raises(BadArgument) as caught:
        configure(values)
    assert text in str(caught.value)


def test_sections_and_keys_give_the_same_configuration_and_every_key_is_described():
    nested = configure({"data": {"name": "bank", "clients": 3}, "training": {"lr": 1}})
    assert nested == configure({"data": "bank", "clients": 3, "lr": 1.0})
    assert configure(nested.model_dump()) == nested
    assert nested.changed(lr=2.0).training.lr == 2.0
    assert (nested.data.name, nested.model.name, nested.defence.name) == ("bank", "mlp", "veil")
    assert format_command(nested) == "--data bank --clients 3 --lr 1.0"
    for section in SECTIONS.values():
        assert all(field.description for field in section.model_fields.values())
    assert set(get_args(LossName)) == set(LOSSES)


@pytest.mark.parametrize("text", ['{"data": {}}', '{"schema": 2}', "[1]", "{"])
def test_a_file_of_another_schema_or_form_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        BadArgument,
        match=r"has schema (None|2), but this version of Fedveil reads|invalid JSON|must contain a JSON object",
    ):
        read_config(tmp_path)
    (tmp_path / "bad.toml").write_text("epochs = ")
    with pytest.raises(BadArgument, match=r"bad.toml: invalid TOML"):
        read_file(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        ({"data": "digits"}, "cross_entropy"),
        ({"data": "diabetes"}, "squared_error"),
        ({"data": "bank"}, "squared_error"),
        ({"data": "bank", "task": "classification"}, "cross_entropy"),
        ({"data": "csv", "task": "regression"}, "squared_error"),
        ({"data": "csv"}, None),
        ({"data": "my.package:data"}, None),
    ],
)
def test_the_default_loss_needs_no_records_where_the_task_is_known(values, loss):
    config = choose_loss(configure(values))
    assert config.training.loss == loss
    if values in ({"data": "digits"}, {"data": "diabetes"}):
        assert choose_loss(config_of(**values), load_data(config)) == config
