"""Any CSV file: encoding, guesses that notes report, missing cells, and errors that name line, column and fix."""

import numpy as np
import pytest
import torch
from tests.data.making import refused

from fedveil.data import csv_file, load, split
from fedveil.data.tables import find_delimiter


def write_rows(tmp_path, *rows):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(rows))
    return path


def flowers(tmp_path):
    rows = (f"{n}.5,{'red' if n % 3 else 'blue'},{'a' if n % 2 else 'b'}" for n in range(20))
    return write_rows(tmp_path, "size,colour,kind", *rows)


def test_words_are_classes_and_numbers_a_regression_whose_scale_is_kept(tmp_path):
    path = flowers(tmp_path)
    found = load("csv", path=path, target="kind")
    assert repr(found) == "Data('mine', train=16, test=4, input (3,), 2 classes)"
    assert (found.classes, set(found.columns), found.target_scale) == (("a", "b"), {"size", "colour"}, None)
    assert abs(found.train.inputs[:, 0].mean()) < 1e-6
    assert np.array_equal(found.columns["colour"] == "red", found.train.inputs[:, 2].bool().numpy())
    assert found.notes[0] == "classification, because the target 'kind' has 2 distinct words, such as 'a'"
    assert "colour (2 values)" in found.notes[2]
    found = load("csv", path=path, target="size", test_share=0.5, ignore=["kind"])
    assert (found.classes, found.train.inputs.shape, found.train.targets.shape) == ((), (10, 2), (10, 1))
    sizes = torch.cat([found.original_units(part.targets) for part in (found.train, found.test)]).flatten()
    torch.testing.assert_close(sizes.sort().values, torch.arange(20) + 0.5)
    mean, deviation = found.target_scale
    torch.testing.assert_close(torch.tensor(mean), found.original_units(found.train.targets).mean())
    torch.testing.assert_close(torch.tensor(deviation), found.original_units(found.train.targets).std(correction=0))
    first, *_, last = found.notes
    assert first == "regression, because the target 'size' has numbers; use --task classification if they are classes"
    assert f"an mse of 1 corresponds to a squared error of {deviation**2:.4g} in the original units" in last


@pytest.mark.parametrize(
    ("values", "classes", "note"),
    [
        (("2", "10", "3", "4", "5"), (), "numbers, but only 5 distinct integers; use --task classification if they"),
        (("0", "1"), ("0", "1"), 'has only 0 and 1; use --task regression (in Python task="regression") if they are'),
        (("0.0", "1.0"), ("0.0", "1.0"), "two classes, because the target 'y' has only 0 and 1"),
        (("0.5", "1"), (), "regression, because the target 'y' has numbers;"),
        (("0", "1", "1.0", "00"), ("0", "1"), "two classes"),  # spellings of one number are one class
    ],
)
def test_a_few_integers_are_classes_if_they_are_two_or_if_that_is_asked(values, classes, note, tmp_path):
    path = write_rows(tmp_path, "x,y", *(f"{n},{values[n % len(values)]}" for n in range(20)))
    found = load("csv", path=path, target="y")
    assert found.classes == classes
    assert note in found.notes[0]
    asked = load("csv", path=path, target="y", task="classification")
    kept = {value for value in values if value not in ("00", "1.0") or value in classes}
    assert asked.classes == tuple(sorted(kept, key=float))
    assert asked.notes == ("divided at random: 16 records for training, 4 for testing",)
    assert load("csv", path=path, target="y", task="regression").target_scale
    assert len(load("csv", path=path, target="y", categorical="y").classes) == len(values)


def test_numbers_may_be_categories_and_columns_that_are_no_input_divide_clients(tmp_path):
    rows = (f"{'abc'[n % 3] * 5000},{n % 3},{n % 2}" for n in range(30))
    path = write_rows(tmp_path, "hospital,code,y", *rows)
    for categorical in (["code"], "code", ("code",)):
        found = load("csv", path=path, target="y", ignore="hospital", categorical=categorical)
        assert found.train.inputs.shape == (24, 3)
    shares = split(found, 3, how="column", column="hospital")
    homes = [{found.columns["hospital"][row][0] for row in share.tolist()} for share in shares]
    assert sorted(homes, key=min) == [{"a"}, {"b"}, {"c"}]


def test_columns_without_a_name_are_left_out(tmp_path):
    rows = [f"{n},{n * n},{n % 3}," for n in range(10)]
    found = load("csv", path=write_rows(tmp_path, ",x,y,", *rows), target="y")
    assert found.train.inputs.shape == (8, 1)
    assert "'Unnamed: 0', 'Unnamed: 3'" in found.notes[0]
    again = write_rows(tmp_path, "Unnamed: 0,x,y", *(row[:-1] for row in rows))  # as pandas writes it the second time
    assert load("csv", path=again, target="y").train.inputs.shape == (8, 1)


@pytest.mark.parametrize(
    ("lines", "delimiter"),
    [
        (["a,b,c", "1,2,3"], ","),
        (["a;b;c", "1,5;2,5;3,5"], ";"),
        (["a\tb\tc", "1\t2\t3"], "\t"),
        (["id|name|note (a, b, c, d)", "1|x|y"], "|"),
        (['"a;b","c"', '"1;2","3"'], ","),
        (["a;b", "1;2", "3;4;5"], ";"),
        (["only"], ","),
    ],
)
def test_the_delimiter_is_found(lines, delimiter):
    assert find_delimiter("\n".join(lines)) == delimiter
    assert find_delimiter("\n".join([*lines, *lines[-1:] * 50_000])) == delimiter


@pytest.mark.parametrize(("mark", "names"), [(";", ["';'", ";"]), ("\t", ["tabs", "\t", "\\t", "tab"])])
def test_a_delimiter_that_was_found_is_reported_and_may_be_given(mark, names, tmp_path):
    path = flowers(tmp_path)
    wanted = load("csv", path=path, target="kind")
    path.write_text(path.read_text().replace(",", mark))
    found = load("csv", path=path, target="kind")
    assert torch.equal(found.train.inputs, wanted.train.inputs)
    assert found.notes == (f"fields are separated by {names[0]}", *wanted.notes)
    given = [load("csv", path=path, target="kind", delimiter=name) for name in names[1:]]
    assert all(torch.equal(one.train.inputs, wanted.train.inputs) and one.notes == wanted.notes for one in given)


def test_decimal_commas_are_read_where_they_are_asked_for(tmp_path):
    path = flowers(tmp_path)
    wanted = load("csv", path=path, target="size")
    path.write_text(path.read_text().replace(",", ";").replace(".", ","))
    found = load("csv", path=path, target="size", decimal=",")
    assert torch.equal(found.train.targets, wanted.train.targets)
    text = "line 2, column 'size': '0,5' is not a number with '.' as the decimal mark, but would be one with ','"
    with refused(text, '--decimal , (in Python decimal=",")', "--task classification (in Python task="):
        load("csv", path=path, target="size")
    with refused(text, 'or use --categorical size (in Python categorical=["size"])'):
        load("csv", path=path, target="kind")


GAPS = ["age,colour,y", "1,red,0.5", "NA,red,1.5", "2,,2.5", "30,blue,?", "4,None,4.5", "None,unknown,5.5", "6,n/a,6.5"]
GAPS += [f"{n},red,{n}.5" for n in range(8)]


def test_missing_cells_are_refused_with_their_number_and_the_choices(tmp_path):
    with refused(
        "mine.csv, line 3, column 'age': 'NA' counts as missing. 5 of 15 records have missing cells: "
        "5 in 3 columns (age: 2, colour: 2, y: 1)",
        "use --missing drop to leave these records out, or --missing impute to fill in the cells",
    ) as caught:
        load("csv", path=write_rows(tmp_path, *GAPS), target="y")
    assert "--categorical" not in str(caught.value)  # numbers do not become categories for the sake of NA
    with refused("line 4, column 'colour': the cell is empty. 2 of 14 records have missing cells: 2 in 1 column (col"):
        load("csv", path=write_rows(tmp_path, *(row for row in GAPS if "?" not in row)), target="y", ignore="age")


def test_a_word_for_missing_may_be_a_value(tmp_path):
    path = write_rows(tmp_path, "region,y", *(f"{('NA', 'EU', '?')[n % 3]},{n}" for n in range(12)))
    with refused(
        "line 2, column 'region': 'NA' counts as missing", "--categorical region", "if 'NA' is an ordinary value"
    ):
        load("csv", path=path, target="y")
    found = load("csv", path=path, target="y", categorical="region")
    assert set(found.columns["region"]) == {"NA", "EU", "?"}
    assert load("csv", path=path, target="region", categorical="region").classes == ("?", "EU", "NA")


def test_records_with_missing_cells_are_dropped_or_imputed_on_request_and_targets_never_filled_in(tmp_path):
    found = load("csv", path=write_rows(tmp_path, *GAPS), target="y", missing="drop")
    assert len(found.train.targets) + len(found.test.targets) == 10
    assert found.notes[1:3] == (
        "left out 1 of 15 records because the target is missing",
        "left out 4 of 15 records because of missing cells (age: 2, colour: 2)",
    )
    targets = torch.cat([found.original_units(part.targets) for part in (found.train, found.test)]).flatten()
    torch.testing.assert_close(targets.sort().values, torch.tensor([0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 4.5, 5.5, 6.5, 7.5]))
    assert set(found.columns["colour"]) <= {"red", "None", "unknown"}  # among words "None" is one
    for seed in range(5):
        found = load("csv", path=write_rows(tmp_path, *GAPS), target="y", missing="impute", seed=seed)
        assert len(found.train.targets) + len(found.test.targets) == 14
        cells = found.columns["age"].tolist()
        median = np.median([float(cell) for cell in cells if cell.isdecimal()])  # others were filled in
        assert all(float(cell) == median for cell in cells if not cell.isdecimal())
        assert found.notes[1] == "left out 1 of 15 records because the target is missing"
        assert f"age: 2 with the median {median:.4g}, colour: 2 with the category 'missing'" in found.notes[3]
        assert found.notes[4] == "treated as categories: colour (4 values)"  # red, None, unknown and missing
        assert found.train.inputs.shape[1] == 1 + 4
        assert found.train.inputs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (
            {"target": None},
            ["load('csv'): the column to predict is not specified", "target=) with one of size, colour, kind"],
        ),
        ({"target": "kin"}, ["mine.csv: there is no column 'kin'", "use 'kind'"]),
        ({"ignore": ["size", "colour"]}, ["no columns are left as inputs"]),
        ({"ignore": ["kind"]}, ["'kind' is both the target and an ignored column"]),
        ({"test_share": 0.001}, ["20 records are too few to divide"]),
        ({"delimiter": ";;"}, ["delimiter must be one character, got ';;'", 'or "tab"']),
        ({"delimiter": ";"}, ["line 1: with the delimiter ';' there is only one column, 'size,colour,kind'", "--del"]),
        ({"decimal": ",", "delimiter": ","}, ["',' is both the decimal mark and the delimiter", "--delimiter ';'"]),
        ({"task": "regression"}, ["line 2, column 'kind': 'b' is not a number", "--task classification"]),
        (
            {"task": "regression", "categorical": "kind"},
            ["needs numbers, but the target 'kind' is listed in categorical"],
        ),
    ],
)
def test_options_that_do_not_fit_the_file_are_refused(options, texts, tmp_path):
    with refused(*texts):
        load("csv", **({"path": flowers(tmp_path), "target": "kind"} | options))


NINE = [f"{n},{n % 2}" for n in range(9)]


@pytest.mark.parametrize(
    ("rows", "options", "texts"),
    [
        (["1,", ",1", "3,"], {"missing": "drop"}, ["mine.csv: every record has missing cells"]),
        (["NA,1", ",2", "?,3"], {}, ["column 'x': every cell is missing", "--ignore x"]),
        ([*NINE, "-,1"], {}, ["line 11, column 'x': '-' is not a number", "empty it if", "--categorical x"]),
        ([*NINE, "1,-"], {}, ["line 11, column 'y': '-' is not a number", "--task classification"]),
        ([*NINE, "1_0,1"], {}, ["line 11, column 'x': '1_0' is not a number"]),
        ([f"id{n},{n % 2}" for n in range(1001)], {}, ["column 'x': 1,001 distinct values", "--ignore x", "dates"]),
        ([f"{n},id{n}" for n in range(1001)], {}, ["column 'y': 1,001", "too many for classes", "--task reg"]),
        ([f"{n},1" for n in range(9)], {}, ["column 'y': every record has the value '1'"]),
        ([*NINE, "1e308,1"], {}, ["line 11, column 'x'", "'1e308' is too large to be standardised"]),
    ],
)
def test_columns_that_cannot_be_encoded_are_named(rows, options, texts, tmp_path):
    with refused(*texts):
        load("csv", path=write_rows(tmp_path, "x,y", *rows), target="y", **options)


def test_what_is_loaded_is_finite_or_refused_wherever_a_large_number_is(tmp_path):
    for line in range(2, 22):
        rows = [f"{number},5,{number % 2}" for number in range(20)]
        rows[line - 2] = "1,1e60,1"  # scaled by itself if it is a test record: beyond float32
        try:
            data = load("csv", path=write_rows(tmp_path, "a,b,y", *rows), target="y")
        except ValueError as error:
            assert f"line {line}, column 'b'" in str(error)  # noqa: PT017
        else:
            assert torch.cat([data.train.inputs, data.test.inputs]).isfinite().all()
            assert (data.train.inputs[:, 1] > 1).any()


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", ["the file is empty", "a CSV file with a header"]),
        (b"a,y\n", ["there is a header but no rows"]),
        (b"a y\n1 2\n", ["line 1: with the delimiter ',' there is only one column, 'a y'", "use --delimiter"]),
        *((start + b"rest", ["it is not CSV, but", "save it as CSV in UTF-8"]) for start in csv_file._OTHER_SIGNATURES),
        ("größe,y\n1,2\n".encode("latin1"), ["line 1: it is not UTF-8 text", "iconv -f latin1"]),
        (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", ["line 1: the header should contain the names", "(5.1, 3.5)"]),
        (b"5.1,5.1,setosa\n", ["line 1: several columns have the same name: 5.1", "give each column a unique name"]),
        (b"a,y\n1,2\n3\n", ["line 3: expected 2 fields, as in the header, got 1", "if it is not ','"]),
    ],
)
def test_files_that_are_not_tables_are_refused_by_their_kind(content, texts, tmp_path):
    (tmp_path / "mine.csv").write_bytes(content)
    with refused(tmp_path / "mine.csv", *texts):
        load("csv", path=tmp_path / "mine.csv", target="y")
    with refused(tmp_path, "it is a folder, not a CSV file", "or use --data images for a folder of images"):
        load("csv", path=tmp_path, target="y")


def test_identifiers_and_a_category_per_record_are_pointed_out(tmp_path):
    rows = (f"{k},2026-01-{k:02} {k}h,{k % 7},{k % 2}" for k in range(100))
    path = write_rows(tmp_path, "id,day,size,kind", *rows)
    notes = load("csv", path=path, target="kind").notes
    assert any("'day': too many categories" in note and "--ignore for dates" in note for note in notes)
    assert any("'id' contains row numbers" in note and "--ignore id" in note for note in notes)
    assert not any("row numbers" in note for note in load("csv", path=path, target="kind", ignore="id").notes)
