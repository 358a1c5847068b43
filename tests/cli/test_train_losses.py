"""A loss that does not go with the data is refused by `fedveil train` before a folder is made."""

import pytest
import torch

from fedveil.cli import main


@pytest.fixture
def table(tmp_path, monkeypatch):
    """mine.csv: a price, a label of 0 and 1, stars from 1 to 5, a colour."""
    monkeypatch.chdir(tmp_path)
    rows = (f"{n},{n * 1.5},{n % 2},{1 + n % 5},{'red' if n % 3 else 'blue'}" for n in range(60))
    (tmp_path / "mine.csv").write_text("\n".join(["x,price,label,stars,colour", *rows]))
    return tmp_path


CSV = ["train", "--data", "csv", "--path", "mine.csv", "--epochs", "1", "--clients", "2"]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            ["--target", "price", "--loss", "cross_entropy"],
            ["'price' of 'mine' is a regression", "--loss squared_error", "--task classification"],
        ),
        (["--target", "price", "--loss", "hinge"], ["hinge compares classes", "--loss squared_error"]),
        (["--target", "price", "--loss", "binary_cross_entropy"], ["targets from 0 to 1", "--loss squared_error"]),
        (["--target", "price", "--loss", "poisson"], ["takes counts, not standardised", "--loss squared_error"]),
        (["--target", "price", "--label-smoothing", "0.1"], ["is a regression", "leave --label-smoothing out"]),
        (["--target", "colour", "--loss", "binary_cross_entropy"], ["has one class", "--loss cross_entropy"]),
    ],
)
def test_a_loss_that_does_not_go_with_the_column_is_refused(words, texts, table, capsys):
    assert main([*CSV, *words]) == 2
    err = capsys.readouterr().err
    assert all(text in err for text in texts), err
    assert not (table / "runs").exists()


def test_a_column_of_two_integers_trains_two_classes_and_says_so(table, capsys):
    assert main([*CSV, "--target", "label"]) == 0
    out, err = capsys.readouterr()
    assert "two classes, as the target 'label' holds only 0 and 1; --task regression" in err
    assert "accuracy" in out
    assert main([*CSV, "--target", "label", "--task", "regression"]) == 0
    assert "rmse" in capsys.readouterr().out


def test_the_task_that_was_chosen_for_ratings_is_said_with_its_reason(table, capsys):
    assert main([*CSV, "--target", "stars"]) == 0
    assert "a regression, as the target 'stars' holds numbers, which are only 5 different" in capsys.readouterr().err


def floats():
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    pair = inputs, (inputs[:, 0] > 0).float()
    return pair, pair


def test_floating_zeros_and_ones_of_a_users_own_data_need_a_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--data", "tests.cli.test_train_losses:floats", "--epochs", "1", "--clients", "2"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "all of them 0 or 1: classes or quantities?\n" in err
    assert "int64" in err
    assert "--loss squared_error" in err
    assert main([*words, "--loss", "squared_error"]) == 0
