"""Any CSV file: encoding, the guesses that are said, missing cells, and errors that name line, column and fix."""

import gzip

import numpy as np
import pytest
import torch
from tests.data.making import refused

from fedveil.data import load, split
from fedveil.data.tables import find_delimiter


def write_rows(tmp_path, *rows):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(rows))
    return path


def flowers(tmp_path):
    rows = (f"{n}.5,{'red' if n % 3 else 'blue'},{'a' if n % 2 else 'b'}" for n in range(20))
    return write_rows(tmp_path, "size,colour,kind", *rows)


def test_any_csv_file_is_a_classification(tmp_path):
    found = load("csv", path=flowers(tmp_path), target="kind")
    assert (found.name, found.classes, found.train.inputs.shape) == ("mine", ("a", "b"), (16, 3))
    assert abs(found.train.inputs[:, 0].mean()) < 1e-6
    assert set(found.columns) == {"size", "colour"}
    assert np.array_equal(found.columns["colour"] == "red", found.train.inputs[:, 2].bool().numpy())
    assert found.target_scale is None
    assert found.notes == (
        "a classification, as the target 'kind' holds 2 different words such as 'a'",
        "divided at random: 16 records for training, 4 for testing",
        "taken as categories: colour (2 values)",
    )


def test_any_csv_file_is_a_regression(tmp_path):
    found = load("csv", path=flowers(tmp_path), target="size", task="regression", test_share=0.5, ignore=["kind"])
    assert (found.classes, found.train.inputs.shape, found.train.targets.shape) == ((), (10, 2), (10, 1))
    assert abs(found.train.targets.mean()) < 1e-6


def test_a_numeric_target_is_a_regression_and_its_scale_is_kept(tmp_path):
    path = flowers(tmp_path)
    found = load("csv", path=path, target="size")
    assert (found.classes, found.outputs) == ((), 1)
    sizes = torch.cat([found.original_units(part.targets) for part in (found.train, found.test)]).flatten()
    torch.testing.assert_close(sizes.sort().values, torch.arange(20) + 0.5)
    mean, deviation = found.target_scale
    torch.testing.assert_close(torch.tensor(mean), found.original_units(found.train.targets).mean())
    torch.testing.assert_close(torch.tensor(deviation), found.original_units(found.train.targets).std(correction=0))
    first, *_, last = found.notes
    assert first == "a regression, as the target 'size' holds numbers; --task classification if they are classes"
    assert last == (
        f"the target 'size' is standardised (mean {mean:.4g} and deviation {deviation:.4g} become 0 and 1): "
        f"an mse of 1 is a squared error of {deviation**2:.4g} in its own units"
    )


def test_a_few_integers_are_a_regression_that_says_so(tmp_path):
    path = write_rows(tmp_path, "x,stars", *(f"{n},{1 + n % 5}" for n in range(20)))
    found = load("csv", path=path, target="stars")
    assert found.classes == ()
    assert found.notes[0] == (
        "a regression, as the target 'stars' holds numbers, which are only 5 different integers; "
        "--task classification if they are classes"
    )
    asked = load("csv", path=path, target="stars", task="classification")
    assert asked.classes == ("1", "2", "3", "4", "5")
    assert asked.notes == ("divided at random: 16 records for training, 4 for testing",)


@pytest.mark.parametrize("names", [("0", "1"), ("1", "2"), ("-1", "1"), ("0.0", "1.0")])
def test_two_different_integers_are_two_classes(names, tmp_path):
    path = write_rows(tmp_path, "x,label", *(f"{n},{names[n % 2]}" for n in range(20)))
    found = load("csv", path=path, target="label")
    assert found.classes == names
    assert found.train.targets.dtype == torch.int64
    held = " and ".join(name.removesuffix(".0") for name in names)
    assert found.notes[0] == (
        f"two classes, as the target 'label' holds only {held}; "
        '--task regression (in Python task="regression") if they are quantities'
    )
    asked = load("csv", path=path, target="label", task="regression")
    assert asked.classes == ()
    assert asked.target_scale
    halves = write_rows(tmp_path, "x,dose", *(f"{n},{(0.5, 1)[n % 2]}" for n in range(20)))
    assert load("csv", path=halves, target="dose").classes == ()


def test_spellings_of_one_number_are_one_class(tmp_path):
    path = write_rows(tmp_path, "x,label", *(f"{n},{('0', '1', '1.0', '00')[n % 4]}" for n in range(20)))
    for options in ({}, {"task": "classification"}):
        found = load("csv", path=path, target="label", **options)
        assert found.classes == ("0", "1")
        assert sorted(torch.cat([found.train.targets, found.test.targets]).tolist()) == [0] * 10 + [1] * 10
    assert len(load("csv", path=path, target="label", categorical="label").classes) == 4


def test_classes_that_are_numbers_are_sorted_by_size(tmp_path):
    path = write_rows(tmp_path, "x,y", *(f"{n},{n % 11}" for n in range(33)))
    assert load("csv", path=path, target="y", task="classification").classes == tuple(str(n) for n in range(11))


def test_notes_are_no_part_of_the_repr(tmp_path):
    found = load("csv", path=flowers(tmp_path), target="kind")
    assert repr(found) == "Data('mine', train=16, test=4, input (3,), 2 classes)"


def test_numbers_may_be_categories(tmp_path):
    path = write_rows(tmp_path, "code,y", *(f"{n % 3},{n % 2}" for n in range(20)))
    for categorical in (["code"], "code", ("code",)):
        assert load("csv", path=path, target="y", categorical=categorical).train.inputs.shape == (16, 3)
    assert load("csv", path=path, target="y", categorical=["code", "y"]).classes == ("0", "1")


def test_clients_may_be_divided_by_a_column_that_is_no_input(tmp_path):
    path = write_rows(tmp_path, "hospital,x,y", *(f"{'abc'[n % 3] * 5000},{n},{n % 2}" for n in range(30)))
    found = load("csv", path=path, target="y", ignore="hospital")
    assert found.train.inputs.shape == (24, 1)
    shares = split(found, 3, how="column", column="hospital")
    homes = [{found.columns["hospital"][row][0] for row in share.tolist()} for share in shares]
    assert sorted(homes, key=min) == [{"a"}, {"b"}, {"c"}]


def test_columns_without_a_name_are_left_out(tmp_path):
    rows = [f"{n},{n * n},{n % 3}," for n in range(10)]
    found = load("csv", path=write_rows(tmp_path, ",x,y,", *rows), target="y")
    assert found.train.inputs.shape == (8, 1)
    text = "left out columns without a name, which are mostly row numbers: 'Unnamed: 0', 'Unnamed: 3'"
    assert found.notes[0] == text
    again = write_rows(tmp_path, "Unnamed: 0,x,y", *(row[:-1] for row in rows))  # as pandas writes it the second time
    assert load("csv", path=again, target="y").train.inputs.shape == (8, 1)


def test_the_seed_decides_which_records_test(tmp_path):
    path = flowers(tmp_path)
    tests = [load("csv", path=path, target="kind", seed=seed).test.inputs for seed in (0, 0, 1)]
    assert torch.equal(tests[0], tests[1])
    assert not torch.equal(tests[0], tests[2])


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


@pytest.mark.parametrize(
    ("mark", "note"), [(";", "fields are separated by ';'"), ("\t", "fields are separated by tabs")]
)
def test_a_delimiter_that_was_found_is_said(mark, note, tmp_path):
    path = flowers(tmp_path)
    wanted = load("csv", path=path, target="kind")
    path.write_text(path.read_text().replace(",", mark))
    found = load("csv", path=path, target="kind")
    assert torch.equal(found.train.inputs, wanted.train.inputs)
    assert (found.notes[0], found.notes[1:]) == (note, wanted.notes)
    given = [
        load("csv", path=path, target="kind", delimiter=name)
        for name in ({";"} if mark == ";" else {"\t", "\\t", "tab"})
    ]
    assert all(torch.equal(one.train.inputs, wanted.train.inputs) and one.notes == wanted.notes for one in given)


def test_decimal_commas_are_read_where_they_are_asked_for(tmp_path):
    path = flowers(tmp_path)
    wanted = load("csv", path=path, target="size")
    path.write_text(path.read_text().replace(",", ";").replace(".", ","))
    found = load("csv", path=path, target="size", decimal=",")
    assert torch.equal(found.train.targets, wanted.train.targets)
    assert found.target_scale == wanted.target_scale
    text = "line 2, column 'size': '0,5' is not a number with '.' as the decimal mark, but would be one with ','"
    with refused(
        text, '--decimal , (in Python decimal=",")', '--task classification (in Python task="classification")'
    ):
        load("csv", path=path, target="size")
    with refused(text, 'else use --categorical size (in Python categorical=["size"])'):
        load("csv", path=path, target="kind")


GAPS = ["age,colour,y", "1,red,0.5", "NA,red,1.5", "2,,2.5", "30,blue,?", "4,None,4.5", "None,unknown,5.5", "6,n/a,6.5"]
GAPS += [f"{n},red,{n}.5" for n in range(8)]


def test_missing_cells_are_refused_with_their_number_and_the_choices(tmp_path):
    with refused(
        "mine.csv, line 3, column 'age': 'NA' means missing. 5 of 15 records have missing cells: "
        "5 in 3 columns (age: 2, colour: 2, y: 1)",
        "use --missing drop to leave these records out, or --missing impute to fill the cells in",
        '(in Python missing="drop" or missing="impute")',
    ) as caught:
        load("csv", path=write_rows(tmp_path, *GAPS), target="y")
    assert "--categorical" not in str(caught.value)  # numbers do not become categories for the sake of NA
    with refused("line 4, column 'colour': the cell is empty. 2 of 14 records have missing cells: 2 in 1 column (col"):
        load("csv", path=write_rows(tmp_path, *(row for row in GAPS if "?" not in row)), target="y", ignore="age")


def test_a_word_for_missing_may_be_a_value(tmp_path):
    path = write_rows(tmp_path, "region,y", *(f"{('NA', 'EU', '?')[n % 3]},{n}" for n in range(12)))
    with refused("line 2, column 'region': 'NA' means missing", "--categorical region", "if 'NA' is a value like any"):
        load("csv", path=path, target="y")
    found = load("csv", path=path, target="y", categorical="region")
    assert set(found.columns["region"]) == {"NA", "EU", "?"}
    assert load("csv", path=path, target="region", categorical="region").classes == ("?", "EU", "NA")


def test_records_with_missing_cells_are_dropped_on_request(tmp_path):
    found = load("csv", path=write_rows(tmp_path, *GAPS), target="y", missing="drop")
    assert len(found.train.targets) + len(found.test.targets) == 10
    assert found.notes[1:3] == (
        "left out without a target: 1 of 15 records",
        "left out for missing cells (age: 2, colour: 2): 4 of 15 records",
    )
    targets = torch.cat([found.original_units(part.targets) for part in (found.train, found.test)]).flatten()
    torch.testing.assert_close(targets.sort().values, torch.tensor([0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 4.5, 5.5, 6.5, 7.5]))
    assert set(found.columns["colour"]) <= {"red", "None", "unknown"}  # among words "None" is one


def test_missing_cells_are_imputed_on_request_and_targets_never(tmp_path):
    path = write_rows(tmp_path, *GAPS)
    found = load("csv", path=path, target="y", missing="impute")
    assert len(found.train.targets) + len(found.test.targets) == 14
    median = np.median([float(cell) for cell in found.columns["age"]])  # which those that were filled in do not move
    assert found.notes[1] == "left out without a target: 1 of 15 records"
    assert found.notes[3] == (
        f"filled in 4 missing cells (age: 2 with the median {median:.4g}, colour: 2 with the category 'missing')"
    )
    assert found.notes[4] == "taken as categories: colour (4 values)"  # red, None, unknown and missing
    assert found.train.inputs.shape[1] == 1 + 4
    assert found.train.inputs.isfinite().all()


def test_the_median_is_that_of_the_training_part(tmp_path):
    rows = [f"{'' if n == 3 else 10 * n},{n % 2}" for n in range(10)]
    path = write_rows(tmp_path, "x,y", *rows)
    for seed in range(5):
        found = load("csv", path=path, target="y", task="classification", missing="impute", seed=seed, test_share=0.5)
        cells = [cell for cell in found.columns["x"].tolist() if cell.isdecimal()]
        filled = [cell for cell in found.columns["x"].tolist() if not cell.isdecimal()]
        assert all(float(cell) == np.median([float(known) for known in cells]) for cell in filled)
        assert f"(x: 1 with the median {np.median([float(known) for known in cells]):.4g})" in found.notes[1]


def test_a_file_without_gaps_gives_the_same_records_whatever_is_asked(tmp_path):
    path = flowers(tmp_path)
    found = [load("csv", path=path, target="kind", missing=missing) for missing in ("refuse", "drop", "impute")]
    assert all(torch.equal(one.train.inputs, found[0].train.inputs) and one.notes == found[0].notes for one in found)


@pytest.mark.parametrize(
    ("rows", "options", "texts"),
    [
        (
            ["1,,0", ",a,1", "3,,2"],
            {"missing": "drop"},
            ["every record has missing cells", "b: 2, a: 1", "--missing imp"],
        ),
        (["1,x,0", ",x,1", ",x,2"], {"missing": "drop"}, ["mine.csv: 1 records leave a part empty"]),
        ([",x,0", "NA,x,1", "?,y,2"], {}, ["column 'a': every cell is missing", "--ignore a"]),
        (["1,x,", "1,x,NA"], {"missing": "drop"}, ["column 'y': every cell is missing", "another target"]),
        (["1,x,0"] * 4, {"missing": "guess"}, ["load('csv'): there is no value for missing: 'guess'", "'drop'"]),
    ],
)
def test_gaps_that_leave_nothing_to_learn_from_are_refused(rows, options, texts, tmp_path):
    with refused(*texts):
        load("csv", path=write_rows(tmp_path, "a,b,y", *rows), target="y", **options)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"target": None}, ["load('csv'): it needs the column to predict", "target=) with one of size, colour, kind"]),
        ({"target": "kin"}, ["mine.csv: there is no column 'kin'", "'kind' is the nearest"]),
        ({"ignore": ["size", "colour"]}, ["no column is left for the inputs"]),
        ({"ignore": ["kind"]}, ["'kind' is both the target and in ignore"]),
        ({"ignore": [3]}, ["ignore is [3]", "give names of columns"]),
        ({"ignore": "sise"}, ["there is no column 'sise'", "'size' is the nearest"]),
        ({"task": "guess"}, ["there is no task 'guess'"]),
        ({"test_share": 1.0}, ["test_share is 1.0", "between 0 and 1"]),
        ({"test_share": 0.001}, ["20 records leave a part empty"]),
        ({"delimiter": ";;"}, ["delimiter is ';;'", 'or "tab"']),
        ({"delimiter": ";"}, ["line 1: with ';' between fields there is only one column, 'size,colour,kind'", "--del"]),
        ({"decimal": ";"}, ["the decimal mark is ';'"]),
        ({"decimal": ",", "delimiter": ","}, ["the decimal mark is ',', and so is the delimiter"]),
        ({"seed": -1}, ["seed must be a whole number of at least 0, got -1"]),
        ({"task": "regression"}, ["line 2, column 'kind': 'b' is not a number", "--task classification"]),
        (
            {"task": "regression", "categorical": "kind"},
            ["a regression needs numbers, and the target 'kind' is in cat"],
        ),
    ],
)
def test_what_a_csv_file_cannot_give_is_refused(options, texts, tmp_path):
    with refused(*texts):
        load("csv", **({"path": flowers(tmp_path), "target": "kind"} | options))


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        (
            [*(f"{n},{n % 2}" for n in range(9)), "-,1"],
            ["line 11, column 'x': '-' is not a number", "empty it if", "--cat"],
        ),
        (
            [*(f"{n},{n % 2}" for n in range(9)), "1,-"],
            ["line 11, column 'y': '-' is not a number", "--task classific"],
        ),
        ([*(f"{n},{n % 2}" for n in range(9)), "1_0,1"], ["line 11, column 'x': '1_0' is not a number"]),
        (
            [f"id{n},{n % 2}" for n in range(1001)],
            ["column 'x': 1,001 different values", '--ignore x (in Python ignore=["x"])'],
        ),
        (
            [f"{n},id{n}" for n in range(1001)],
            ["column 'y': 1,001 different values are too many for classes", "--task reg"],
        ),
        ([f"{n},1" for n in range(9)], ["column 'y': every record has the value '1'"]),
        ([f"{n},a" for n in range(9)], ["column 'y': every record has the value 'a'"]),
    ],
)
def test_columns_that_cannot_be_encoded_are_named(rows, texts, tmp_path):
    with refused(*texts):
        load("csv", path=write_rows(tmp_path, "x,y", *rows), target="y")


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", ["the file is empty", "a CSV file with a header"]),
        (b"\n\n", ["the file is empty"]),
        (b"a,y\n", ["there is a header and no row"]),
        (b"y\n1\n2\n", ["line 1: with ',' between fields there is only one column, 'y'", "at least one other"]),
        (b"a y\n1 2\n", ["only one column, 'a y'", """--delimiter ' ' (in Python delimiter=" ")"""]),
        (b"a;y\n1,5;2\n", ["line 2, column 'a': '1,5' is not a number with '.' as the decimal mark"]),
        (b"PK\x03\x04rest", ["it is an Excel workbook or a zip file, not a CSV file", "save the sheet as CSV UTF-8"]),
        (b"\xd0\xcf\x11\xe0rest", ["it is an Excel workbook"]),
        (b"PAR1rest", ["it is a Parquet file", "pandas.read_parquet(path).to_csv('records.csv', index=False)"]),
        (b"ARROW1rest", ["it is a Feather file", "pandas.read_feather"]),
        (gzip.compress(b"a,y\n1,2\n", mtime=0), ["it is compressed with gzip", "gunzip"]),
        (b"<!DOCTYPE html>", ["it is a web page", "download the file itself"]),
        (b'{"a": [1]}', ["it is JSON", "pandas.read_json"]),
        ("a,y\n1,2\n".encode("utf-16"), ["it is UTF-16 text", "iconv -f utf-16"]),
        ("größe,y\n1,2\n".encode("latin1"), ["line 1: it is not UTF-8 text", "iconv -f latin1"]),
        (
            b"5.1,3.5,setosa\n4.9,3.0,setosa\n",
            ["line 1: the header should hold the names of the columns", "(5.1, 3.5)"],
        ),
        (b"5.1,5.1,setosa\n4.9,3.0,setosa\n", ["line 1: columns are named twice: 5.1", "give each column a name"]),
        (b"a,y\n1,2\n3\n", ["line 3: 1 fields, the header has 2", "if it is not ','"]),
    ],
)
def test_files_that_are_no_tables_are_told_what_they_are(content, texts, tmp_path):
    (tmp_path / "mine.csv").write_bytes(content)
    with refused(tmp_path / "mine.csv", *texts):
        load("csv", path=tmp_path / "mine.csv", target="y")


def test_a_folder_is_told_which_files_it_has(tmp_path):
    with refused(tmp_path, "it is a folder, not a CSV file", "use --data images for a folder of images"):
        load("csv", path=tmp_path, target="kind")
    flowers(tmp_path)
    with refused(tmp_path, "it is a folder, not a CSV file", "name one of its files with --path: mine.csv"):
        load("csv", path=tmp_path, target="kind")


@pytest.mark.parametrize(
    ("cell", "fix"),
    [
        (lambda k: f"€ {k},083.50", "remove currency signs and separators of thousands"),
        (lambda k: f"{2000 + k}-01-{1 + k % 28:02}", "write dates as numbers, such as days since the first"),
        (lambda k: f"name {k} of {k}", "--ignore odd"),
    ],
    ids=["currency", "dates", "names"],
)
def test_words_that_stand_for_numbers_are_told_apart_from_names(tmp_path, cell, fix):
    path = write_rows(tmp_path, "odd;size;kind", *(f"{cell(k)};{k};{'ab'[k % 2]}" for k in range(1100)))
    with refused(fix):
        load("csv", path=path, target="kind")
    if "--ignore" not in fix:
        with refused(fix):
            load("csv", path=path, target="odd")


def test_a_category_per_record_and_few_whole_numbers_are_pointed_out(tmp_path):
    path = write_rows(tmp_path, "day,size,kind", *(f"2026-01-{k:02} {k}h,{k % 7},{k % 2}" for k in range(100)))
    notes = load("csv", path=path, target="kind").notes
    assert any("nearly a category per record in 'day'" in note and "--ignore dates" in note for note in notes)
    assert any(note.startswith("two classes, as the target 'kind' holds only 0 and 1") for note in notes)
