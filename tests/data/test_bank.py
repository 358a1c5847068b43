"""Bank Marketing: encoding, parts, and errors that name the line."""

import pytest
import torch
from tests.data.making import BANK_HEADER, bank_row, bank_text, refused

from fedveil.data import bank, load, split
from fedveil.data.catalogue import CATALOGUE
from fedveil.data.download import compute_digest


@pytest.fixture
def bank_file(tmp_path):
    path = tmp_path / "bank-additional-full.csv"
    path.write_text(bank_text(bank_row(number) for number in range(100)))
    return path


def test_bank_has_parts_of_eight_one_and_one_tenth_and_is_found_in_its_folder(bank_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "bank").mkdir(parents=True)
    bank_file.rename(tmp_path / "data" / "bank" / bank_file.name)
    found = load("bank")
    assert [len(part.inputs) for part in (found.train, found.validation, found.test)] == [80, 10, 10]
    assert (found.train.inputs.shape[1], found.outputs, found.classes) == (63, 1, ())
    assert set(found.train.targets.flatten().tolist()) == {0.0, 1.0}
    assert len(BANK_HEADER) == 21


def test_numbers_are_standardised_categories_one_hot_and_answers_numbers_or_classes(bank_file):
    found = load("bank", path=bank_file)
    numbers, hot = found.train.inputs.split([10, 53], 1)
    torch.testing.assert_close(numbers.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(numbers.std(0, correction=0), torch.ones(10))
    assert hot.unique().tolist() == [0, 1]
    assert (hot.sum(1) == len(bank.CATEGORICAL_COLUMNS)).all()
    assert [bank.CATEGORICAL_COLUMNS["job"][index] for index in hot[:, :12].argmax(1)] == found.columns["job"].tolist()
    shares = split(found, 12, how="column", column="job")
    assert all(len(set(found.columns["job"][share.numpy()])) == 1 for share in shares)
    found = load("bank", path=bank_file, task="classification", duration=False)
    assert (found.classes, found.outputs, found.train.inputs.shape[1]) == (("no", "yes"), 2, 62)
    assert found.train.targets.dtype == torch.int64
    bank_file.write_text(bank_text([bank_row(0)] * 10))  # the width does not depend on the rows
    assert load("bank", path=bank_file).train.inputs.shape == (8, 63)


GOOD = [bank_row(number) for number in range(5)]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (bank_text([*GOOD, bank_row(0, job="pirate")]).encode(), ["line 7, column 'job': 'pirate' is not a known"]),
        (bank_text([GOOD[0], bank_row(0, age="nan")]).encode(), ["line 3, column 'age': 'nan' is not a number"]),
        (bank_text([bank_row(0, y="maybe")]).encode(), ["line 2, column 'y': 'maybe'", "use one of no, yes"]),
        (bank_text(GOOD).encode()[:-3], ["line 6: it is not valid CSV", "unclosed quote"]),
        (bank_text(GOOD).replace(";", ",").encode(), ["line 1: it is not valid CSV", "a delimiter that is not ';'"]),
        (
            bank_text(GOOD).replace('"job"', '"work"').encode(),
            ["line 1: columns are missing: job; the columns are age", "delimiter"],
        ),
        (bank_text(GOOD).replace("housemaid", "h\0").encode(), ["line 5: it contains a NUL byte"]),
    ],
)
def test_damage_is_named_by_file_and_line(content, texts, tmp_path):
    path = tmp_path / "bank-additional-full.csv"
    path.write_bytes(content)
    with refused(path, *texts):
        load("bank", path=path)


def test_the_real_bank_has_its_records(real_data):
    folder = real_data("bank")
    found = load("bank", task="classification")
    parts = (found.train, found.validation, found.test)
    assert [len(part.inputs) for part in parts] == [32950, 4119, 4119]
    assert sum(int(part.targets.sum()) for part in parts) == 4640
    digest = CATALOGUE["bank"].download.digest
    assert compute_digest(folder / "bank-additional-full.csv", digest) == digest
