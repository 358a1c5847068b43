"""What new users type: a table for a configuration, a file for a data set, a model that is misspelt."""

import pytest

from fedveil.cli import main
from fedveil.data import load


@pytest.fixture
def table(tmp_path, monkeypatch):
    """mine.csv, where the command runs: an identifier, a number and a price."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("\n".join(["id,x,price", *(f"{n},{n * n % 7},{n * 1.5}" for n in range(60))]))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["mine.csv", "--target", "price"], ["mine.csv: it is a table", "--data csv --path mine.csv --target COLUMN"]),
        (["--data", "mine.csv", "--target", "price"], ["is a file or folder", "--data csv --path mine.csv"]),
        (["--path", "mine.csv", "--target", "price"], ["--path does not apply to --data digits", "csv"]),
        (["--data", "digits", "--model", "mlpp"], ["there is no model 'mlpp'", "'mlp' is the nearest of"]),
        (["--data", "digits", "--model", "reset20"], ["there is no model 'reset20'", "'resnet20' is the nearest of"]),
        (["gone.toml"], ["gone.toml: cannot be read", "Fix: name a TOML file that is there"]),
        (["quoted.toml"], ["lr must be float, got '0.001'", "Fix: write lr without quotes"]),
    ],
)
def test_what_is_typed_in_the_wrong_place_is_told_its_own(words, texts, table, capsys):
    (table / "quoted.toml").write_text('[training]\nlr = "0.001"\n')
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert all(text in err for text in texts), err


def test_a_folder_for_the_name_of_a_data_set_is_taken_for_images(table, capsys):
    (table / "pictures").mkdir()
    assert main(["train", "--data", "pictures"]) == 2
    assert "--data images --path pictures" in capsys.readouterr().err


def test_a_column_that_counts_the_rows_is_pointed_out(table):
    notes = load("csv", path=table / "mine.csv", target="price").notes
    assert [note for note in notes if "'id' counts the rows" in note and "--ignore id" in note]
    assert not any("counts the rows" in note for note in load("csv", path="mine.csv", target="x", ignore="id").notes)


def test_records_without_columns_cannot_be_divided_by_one(capsys):
    assert main(["train", "--data", "digits", "--split", "column"]) == 2
    assert "Fix: use 'iid' or 'dirichlet': 'digits' has no columns" in capsys.readouterr().err
