"""New records are encoded as the training records were, and what cannot be encoded is named by row and column."""

import csv
import itertools
import json
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.runs.tables import NUMBERS, WORDS, write_bank, write_new
from torch import nn

import fedveil
from fedveil import cli
from fedveil.data import load
from fedveil.data.splits import divide
from fedveil.errors import BadArgument
from fedveil.federation.results import RunDetails
from fedveil.models import mlp
from fedveil.runs.export import export_model

HERE = "tests.runs.test_predict"
QUICK = ["--defence", "plain", "--clients", "2", "--hidden", "8", "--epochs", "2", "--lr", "0.01", "--quiet"]
OPTIONS = {"target": "y", "categorical": ["region"], "missing": "impute"}
TABLE = ["--data", "csv", "--target", "y", "--categorical", "region"]


def train(folder, *words):
    assert cli.main(["train", *QUICK, *words, "--out", str(folder)]) == 0


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    """A folder with bank.csv and a run on it."""
    home = tmp_path_factory.mktemp("bank")
    write_bank(home / "bank.csv")
    train(home / "run", *TABLE, "--path", str(home / "bank.csv"), "--missing", "impute", "--epochs", "15")
    return home


def read(path, delimiter=","):
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def complete(cell, absent, value):
    return value if cell in absent else cell


def reference(rows, table):
    """The inputs of new rows, computed from the training file with nothing of Fedveil's but its split."""
    train_rows, _ = divide(len(table), (0.8, 0.2), 0)
    absent, parts = ("", "NA", "?"), []
    for name in NUMBERS:
        cells = [table[row][name] for row in train_rows]
        median = statistics.median(float(cell) for cell in cells if cell not in absent)
        trained = [float(complete(cell, absent, median)) for cell in cells]
        mean, deviation = statistics.fmean(trained), statistics.pstdev(trained)
        parts.append([[(float(complete(row[name], absent, median)) - mean) / deviation] for row in rows])
    for name in (*WORDS, "region"):
        missing = ("",) if name == "region" else absent
        categories = sorted({complete(row[name], missing, "missing") for row in table})
        words = [complete(row[name], missing, "missing") for row in rows]
        parts.append([[float(word == category) for category in categories] for word in words])
    return torch.tensor([list(itertools.chain(*cells)) for cells in zip(*parts, strict=True)])


def test_a_thousand_new_rows_get_the_predictions_of_the_training_pipeline(bank, capsys):
    rows = write_new(bank / "new.csv")
    table = read(bank / "bank.csv", ";")
    out = bank / "predictions.csv"
    words = ["predict", str(bank / "run"), str(bank / "new.csv"), "--out", str(out)]
    assert cli.main([*words, "--unknown", "ignore"]) == 0
    notes = capsys.readouterr().err
    assert "ignored columns that are not inputs: customer" in notes
    assert "filled in" in notes
    new = {name: sum(row[name] == "astronaut" for row in rows) for name in ("job", "poutcome")}
    first, second = sorted(new, key=lambda name: -new[name])
    counts = f"({first}: {new[first]}, {second}: {new[second]})"
    assert f"set all inputs to 0 for unknown categories {counts}\n" in notes
    empty = sum(row["poutcome"] in ("", "NA", "?") for row in rows)
    assert f"set all inputs to 0 for missing cells in columns without a fill value (poutcome: {empty})\n" in notes
    wanted = fedveil.load_model(bank / "run")(reference(rows, table)).softmax(1).detach().numpy()
    found = read(out)
    assert [row["row"] for row in found] == [str(number) for number in range(1, 1001)]
    probabilities = np.array([[float(row["probability_no"]), float(row["probability_yes"])] for row in found])
    np.testing.assert_allclose(probabilities, wanted, atol=1e-6, rtol=0)
    assert [row["prediction"] for row in found] == [("no", "yes")[index] for index in probabilities.argmax(1)]
    assert {row["prediction"] for row in found} == {"no", "yes"}


def test_the_training_file_itself_is_encoded_bit_for_bit_as_in_training(bank):
    data = load("csv", path=bank / "bank.csv", **OPTIONS)
    found = fedveil.load_predictor(bank / "run").encode(bank / "bank.csv")
    train_rows, test_rows = divide(len(found.inputs), (0.8, 0.2), 0)
    assert torch.equal(found.inputs[train_rows], data.train.inputs)
    assert torch.equal(found.inputs[test_rows], data.test.inputs)
    assert found.notes == ["ignored columns that are not inputs: y", data.notes[3]]


def test_the_best_model_predicts_and_arrays_of_inputs_are_taken_as_they_are(bank, tmp_path):
    x = load("csv", path=bank / "bank.csv", **OPTIONS).test.tensor
    last, best = (fedveil.load_predictor(bank / "run", best=best) for best in (False, True))
    wanted = fedveil.load_model(bank / "run", best=True)(x).double().softmax(1).detach().numpy()
    np.testing.assert_allclose(best(x).probabilities, wanted, atol=1e-6)
    np.savez(tmp_path / "new.npz", inputs=x.double().numpy(), targets=np.zeros(3))
    for same in (x.numpy(), x.double(), tmp_path / "new.npz", str(bank / "bank.csv")):
        assert len(last(same)) == (600 if isinstance(same, str) else len(x))
    np.testing.assert_array_equal(last(tmp_path / "new.npz").probabilities, last(x).probabilities)
    out = tmp_path / "out.npz"
    words = ["predict", str(bank / "run"), str(tmp_path / "new.npz"), "--out", str(out), "--model", "best"]
    assert cli.main(words) == 0
    with np.load(out) as arrays:
        np.testing.assert_array_equal(arrays["probabilities"], best(x.numpy()).probabilities)
        assert set(arrays["labels"]) <= {"no", "yes"}
    with pytest.raises(BadArgument, match=r"expected shape \(records, 16\), got \(2, 5\)"):
        last(torch.zeros(2, 5))


ROW = {"age": "30", "duration": "200", "euribor3m": "1.5", "job": "student", "marital": "single"}
ROW |= {"poutcome": "failure", "region": "1"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"job": "astronaut"}, r"line 3, column 'job': 'astronaut' is not a known value.*--unknown ignore"),
        ({"age": "old"}, r"line 3, column 'age': 'old' is not a number"),
        (
            {"poutcome": "NA"},
            r"line 3, column 'poutcome': 'NA' counts as missing.*no cell of this column was missing in training",
        ),
        ({"age": "1e200"}, r"line 3, column 'age': '1e200' is too large"),
        ({"region": "NA"}, r"line 3, column 'region': 'NA' is not a known value"),
    ],
)
def test_a_cell_that_cannot_be_encoded_is_named_by_row_and_column(bank, tmp_path, change, text):
    with (tmp_path / "new.csv").open("w") as file:
        table = csv.DictWriter(file, ROW)
        table.writeheader()
        table.writerows([ROW, ROW | change])
    predictor = fedveil.load_predictor(bank / "run")
    with pytest.raises(BadArgument, match=f"(?s)new.csv, {text}"):
        predictor(tmp_path / "new.csv")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([ROW, ROW | change])
    with pytest.raises(BadArgument, match=f"(?s)the DataFrame, {text.replace('line 3', 'row 1')}"):
        predictor(frame)
    with pytest.raises(BadArgument, match=r"the DataFrame: columns are missing: age.*\n  Fix: rename the columns"):
        predictor(frame.drop(columns="age"))
    with pytest.raises(BadArgument, match="the DataFrame: there are no records"):
        predictor(frame.head(0))


def test_single_rows_and_repeated_columns_are_refused(bank, tmp_path):
    pandas = pytest.importorskip("pandas")
    numbers = pandas.DataFrame(np.random.default_rng(0).normal(size=(20, 2)), columns=["age", "income"])
    fedveil.Federation(mlp(2, 1, hidden=4), [(numbers, numbers["age"])], "plain").fit(rounds=1, folder=tmp_path)
    own = fedveil.load_predictor(tmp_path, model=mlp(2, 1, hidden=4))
    for predictor, frame in [(fedveil.load_predictor(bank / "run"), pandas.DataFrame([ROW])), (own, numbers)]:
        for record in (frame.iloc[0], dict(frame.iloc[0])):
            text = (
                rf"^new records: they are a {type(record).__name__}, .*\n  Fix: pass a DataFrame: frame.iloc\[\[0\]\]"
            )
            with pytest.raises(BadArgument, match=text):
                predictor(record)
        assert len(predictor(frame.iloc[[0]])) == 1
        with pytest.raises(BadArgument, match=r"^the DataFrame: several columns have the same name: age\.\n"):
            predictor(pandas.concat([frame, frame[["age"]]], axis=1))


def test_a_missing_column_and_files_of_other_kinds_are_refused(bank, tmp_path, capsys):
    (tmp_path / "new.csv").write_text("age,job\n30,student\n")
    run = str(bank / "run")
    for words, text in [
        ([run, str(tmp_path / "new.csv")], "columns are missing: duration, euribor3m, marital, poutcome, region"),
        ([run, str(tmp_path)], "it is a folder, but the model was not trained on images"),
        ([run, str(tmp_path / "gone.csv")], "there is no such file"),
        ([str(tmp_path / "gone"), str(tmp_path / "new.csv")], "this folder does not exist"),
        ([run, str(tmp_path / "new.csv"), "--out", "x.txt"], "x.txt is neither .csv nor .npz"),
        ([run, str(tmp_path / "new.csv"), "--out", str(tmp_path / "new.csv")], "new.csv is the file with the records"),
    ]:
        assert cli.main(["predict", *words]) == 2
        assert text in capsys.readouterr().err


def test_the_delimiter_and_the_decimal_mark_may_differ_from_those_of_the_training_file(bank, tmp_path, capsys):
    plain, other, out = tmp_path / "plain.csv", tmp_path / "other.csv", tmp_path / "p.csv"
    rows = [ROW, ROW | {"euribor3m": "2.5", "age": "31.5"}]
    for path, mark, decimal in ((plain, ",", "."), (other, "\t", ",")):
        text = "\n".join(mark.join(cells) for cells in [ROW, *(row.values() for row in rows)])
        path.write_text(text if decimal == "." else text.replace(".", decimal))
    wanted = fedveil.load_predictor(bank / "run")(plain).probabilities[:, 1].tolist()
    words = ["predict", str(bank / "run"), str(other), "--out", str(out), "--decimal", ","]
    for more in ([], ["--delimiter", "tab"]):
        assert cli.main([*words, *more]) == 0
        assert [float(row["probability_yes"]) for row in read(out)] == wanted
    assert cli.main([*words, "--delimiter", ","]) == 2
    assert "',' is both the decimal mark and the delimiter" in capsys.readouterr().err
    assert cli.main([*words, "--delimiter", ";"]) == 2  # taken as it is, not detected
    assert "columns are missing: age" in capsys.readouterr().err
    own = fedveil.load_predictor(bank / "run", delimiter="tab", decimal=",")
    assert own(other).probabilities[:, 1].tolist() == wanted


def test_frames_are_encoded_as_files_are(bank):
    pandas = pytest.importorskip("pandas")
    rows = write_new(bank / "frame.csv", 200)
    predictor = fedveil.load_predictor(bank / "run", unknown="ignore")
    frame = pandas.read_csv(bank / "frame.csv", na_values="?", index_col="customer")
    assert frame["region"].dtype == float  # 1.0 stands for the category 1
    found, wanted = predictor(frame), predictor(bank / "frame.csv")
    np.testing.assert_array_equal(found.probabilities, wanted.probabilities)
    shown = found.to_frame()
    assert list(shown.columns) == ["prediction", "probability_no", "probability_yes"]
    assert shown.index.equals(frame.index)
    frame = frame.set_axis(frame.index + 7000)  # assignments are aligned by index
    frame["yes"] = predictor(frame).to_frame()["probability_yes"]
    assert list(frame["yes"]) == found.probabilities[:, 1].tolist()
    assert list(shown["prediction"]) == list(found.labels)
    assert len(rows) == len(shown)


def test_rows_that_training_would_leave_out_are_left_out_and_with_refuse_they_are_refused(bank, tmp_path):
    rows = write_new(tmp_path / "new.csv", 50)
    complete = [number for number, row in enumerate(rows) if not {*row.values()} & {"", "NA", "?"}]
    assert 0 < len(complete) < 50
    write_bank(tmp_path / "whole.csv", missing=0.0)
    for how in ("drop", "refuse"):
        train(tmp_path / how, *TABLE, "--path", str(tmp_path / "whole.csv"), "--missing", how)
    predictor = fedveil.load_predictor(tmp_path / "drop", unknown="ignore")
    found = predictor(tmp_path / "new.csv")
    assert found.rows.tolist() == complete
    assert found.to_frame().index.tolist() == complete
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(tmp_path / "new.csv", na_values="?").set_axis([f"r{row}" for row in range(50)])
    assert predictor(frame).to_frame().index.tolist() == [f"r{row}" for row in complete]
    assert any(note.startswith(f"left out {50 - len(complete)} of 50 records") for note in found.notes)
    with pytest.raises(
        BadArgument, match=r"(?s)of 50 records have missing cells.*Fix: fill in the cells.*only if some of its cells"
    ):
        fedveil.load_predictor(tmp_path / "refuse", unknown="ignore")(tmp_path / "new.csv")


def test_numbers_are_in_the_units_of_the_target(tmp_path, capsys):
    train(tmp_path / "run", "--data", "diabetes", "--epochs", "20")
    data = load("diabetes")
    predictor = fedveil.load_predictor(tmp_path / "run")
    mean, deviation = data.target_scale
    wanted = fedveil.load_model(tmp_path / "run")(data.test.tensor).double().detach().numpy()[:, 0] * deviation + mean
    found = predictor(data.test.tensor)
    np.testing.assert_allclose(found.values, wanted, rtol=1e-6)
    assert (found.labels, found.probabilities, found.classes) == (None, None, ())
    assert 50 < found.values.mean() < 250  # not standardised
    columns = json.loads((tmp_path / "run" / "encoding.json").read_text())["inputs"]["columns"]
    measured = "bmi,s1,s2,s3,s4,s5,s6,age,sex,bp\n32.1,157,93.2,38,4,4.8598,87,59,2,101\n"
    (tmp_path / "new.csv").write_text(measured)
    assert sorted(column["name"] for column in columns) == sorted(measured.split("\n")[0].split(","))
    assert (
        cli.main(["predict", str(tmp_path / "run"), str(tmp_path / "new.csv"), "--out", str(tmp_path / "p.csv")]) == 0
    )
    printed = float((tmp_path / "p.csv").read_text().split("\n")[1].split(",")[1])
    assert f"mean {printed:.6g}" in capsys.readouterr().out


def test_images_are_scaled_and_resized_as_in_training(tmp_path):
    images = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for number in range(12):
        shade = 200 if number % 2 else 60
        pixels = random.integers(shade - 50, shade + 50, (20, 24, 3), dtype=np.uint8)
        picture = tmp_path / "pictures" / ("light" if number % 2 else "dark") / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        images.fromarray(pixels).save(picture)
    train(tmp_path / "run", "--data", "images", "--path", str(tmp_path / "pictures"), "--size", "8")
    out = tmp_path / "p.csv"
    assert cli.main(["predict", str(tmp_path / "run"), str(tmp_path / "pictures"), "--out", str(out)]) == 0
    rows = {row["file"]: float(row["probability_light"]) for row in read(out)}
    data, predictor = load("images", path=tmp_path / "pictures", size=8), fedveil.load_predictor(tmp_path / "run")
    known = np.concatenate([predictor(part.tensor).probabilities[:, 1] for part in (data.train, data.test)])
    np.testing.assert_array_equal(sorted(rows.values()), sorted(known))
    assert sorted(rows) == sorted(f"{'light' if n % 2 else 'dark'}/{n}.png" for n in range(12))
    pixels = (255 * data.pixels(data.test.tensor)).round().to(torch.uint8)
    np.testing.assert_allclose(predictor(pixels).probabilities, predictor(data.test.tensor).probabilities, atol=1e-6)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def test_columns_of_frames_are_kept_and_their_order_matters(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["age", "income"])
    price = frame["age"] - 2 * frame["income"]
    clients = [(frame[k::2], price[k::2]) for k in range(2)]
    federation = fedveil.Federation(mlp(2, 1, hidden=4), clients, "plain", adam)
    federation.fit(epochs=1, folder=tmp_path)
    predictor = fedveil.load_predictor(tmp_path, model=mlp(2, 1, hidden=4))
    wanted = federation.model(torch.tensor(frame.to_numpy(), dtype=torch.float32)).detach().numpy()[:, 0]
    np.testing.assert_allclose(predictor(frame[["income", "age"]].assign(more=1)).values, wanted, rtol=1e-6)
    frame[["income", "age"]].to_csv(tmp_path / "new.csv")
    np.testing.assert_allclose(predictor(tmp_path / "new.csv").values, wanted, rtol=1e-6)
    with pytest.raises(BadArgument, match=r"the DataFrame: columns are missing: income"):
        predictor(frame[["age"]])
    swapped = (frame[["income", "age"]], price)
    with pytest.raises(
        BadArgument, match=r"client 1: expected the columns age, income, as for client 0, got income, age"
    ):
        fedveil.Federation(mlp(2, 1), [clients[0], swapped], "plain")


OUTPUTS = {
    "cross_entropy": (3, torch.arange(12) % 3, lambda out: out.softmax(1), lambda p: p.argmax(1)),
    "binary_cross_entropy": (1, torch.arange(12) % 2, lambda out: torch.cat([(-out).sigmoid(), out.sigmoid()], 1),
                             lambda p: p.argmax(1)),
    "hinge": (3, torch.arange(12) % 3, None, lambda out: out.argmax(1)),
    "squared_error": (3, torch.arange(12) % 3, None, lambda out: out.argmax(1)),
    "poisson": (1, torch.arange(12.0)[:, None], None, lambda out: out.exp()[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("loss", OUTPUTS)
def test_outputs_mean_what_the_loss_says(loss, tmp_path):
    count, targets, probable, predict = OUTPUTS[loss]
    x, net = torch.randn(12, 4), mlp(4, count, hidden=4)
    fedveil.Federation(net, [(x, targets)], "plain", adam, loss=loss).fit(epochs=1, folder=tmp_path, test=(x, targets))
    found = fedveil.load_predictor(tmp_path, model=mlp(4, count, hidden=4))(x)
    outputs = net(x).detach().double()
    if probable is None:
        assert found.probabilities is None
        wanted = predict(outputs)
    else:
        np.testing.assert_allclose(found.probabilities, probable(outputs), atol=1e-12)
        wanted = predict(probable(outputs))
    predicted = found.values if found.labels is None else found.labels
    np.testing.assert_allclose(predicted, wanted)
    assert predicted.dtype == (float if found.labels is None else int)


def test_names_and_encodings_can_be_given_from_python(bank, tmp_path):
    data = load("csv", path=bank / "bank.csv", **OPTIONS)
    parts = [(data.train.tensor[k::2], data.train.targets[k::2]) for k in range(2)]
    net = mlp(16, 2, hidden=4)
    fedveil.Federation(net, parts, "plain", adam).fit(
        epochs=1, folder=tmp_path, details=RunDetails(encoding=data.encoding)
    )
    found = fedveil.load_predictor(tmp_path, model=mlp(16, 2, hidden=4))(bank / "bank.csv")
    assert set(found.labels) <= {"no", "yes"}
    assert found.classes == ("no", "yes")
    assert len(found) == 600


def test_a_model_in_float64_takes_rows_and_integers_but_no_nan(bank, tmp_path):
    data = load("csv", path=bank / "bank.csv", **OPTIONS)
    train_part, net = (data.train.tensor, data.train.targets), mlp(16, 2, hidden=4).double()
    details = RunDetails(encoding=data.encoding)
    fedveil.Federation(net, [train_part], "plain", adam).fit(rounds=1, folder=tmp_path, details=details)
    predictor = fedveil.load_predictor(tmp_path, model=mlp(16, 2, hidden=4).double())
    assert len(predictor(bank / "bank.csv")) == 600
    ones = torch.ones(3, 16)
    np.testing.assert_array_equal(predictor(ones.int()).probabilities, predictor(ones).probabilities)
    ones[1, 2] = torch.nan
    with pytest.raises(BadArgument, match="new records, record 1: found NaN or infinity in inputs"):
        predictor(ones)


class Points(nn.Module):
    """A class at each of five positions."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv1d(2, 3, 1)

    def forward(self, x):
        return {"logits": self.head(x), "other": x}


def test_a_class_at_each_position_is_written_as_arrays_but_not_as_csv(tmp_path, capsys):
    x, targets = torch.randn(10, 2, 5), torch.randint(3, (10, 5))
    model = Points()
    fedveil.Federation(model, [(x, targets)], "plain", adam).fit(epochs=1, folder=tmp_path)
    np.save(tmp_path / "new.npy", x.numpy())
    words = ["predict", str(tmp_path), str(tmp_path / "new.npy"), "--network", f"{HERE}:Points", "--out"]
    assert cli.main([*words, str(tmp_path / "p.csv")]) == 2
    assert "use .labels and .probabilities, or --out predictions.npz" in capsys.readouterr().err
    assert cli.main([*words, str(tmp_path / "p.npz")]) == 0
    with np.load(tmp_path / "p.npz") as found:
        wanted = model(x)["logits"].detach().double().softmax(1).numpy()
        np.testing.assert_allclose(found["probabilities"], wanted, atol=1e-6)
        np.testing.assert_array_equal(found["labels"], wanted.argmax(1))


def test_a_chosen_output_is_chosen_again_and_a_function_must_be_passed(tmp_path):
    x, targets = torch.randn(10, 2, 5), torch.randint(3, (10, 5))
    choices = {"logits": ("logits", {}), "function": (first, {"output": first})}
    for name, (output, given) in choices.items():
        model, folder = Points(), tmp_path / name
        fedveil.Federation(model, [(x, targets)], "plain", adam, output=output).fit(epochs=1, folder=folder)
        found = fedveil.load_predictor(folder, model=Points(), **given)(x)
        wanted = model(x)["logits"].detach().double().softmax(1).numpy()
        np.testing.assert_allclose(found.probabilities, wanted, atol=1e-6)
    with pytest.raises(BadArgument, match=r"load_predictor\(\.\.\., output=function\)"):
        fedveil.load_predictor(tmp_path / "function", model=Points())


def first(returned):
    return returned["logits"]


def test_a_damaged_encoding_is_refused_by_its_name(bank, tmp_path):
    text = (bank / "run" / "encoding.json").read_text()
    for change, what in [
        (lambda own: own.pop("schema"), "has schema None"),
        (lambda own: own.update(target=3), "target is not valid"),
        (lambda own: own["inputs"]["columns"][0].update(mean="x"), r"inputs\.table\.columns\.0\.number\.mean"),
    ]:
        own = json.loads(text)
        change(own)
        (tmp_path / "encoding.json").write_text(json.dumps(own))
        with pytest.raises(BadArgument, match=rf"encoding\.json: {what}"):
            fedveil.load_predictor(tmp_path)


def test_what_can_be_known_is_refused_before_torch_is_imported(tmp_path):
    for words in (["predict", "gone", "new.csv"], ["export", "gone"]):
        code = "import sys; from fedveil.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["2", "False"], done.stderr


class Pair(nn.Module):
    """A model of two arguments."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, left, right):
        return self.head(left * right)


def test_several_inputs_are_predicted_but_not_exported(tmp_path):
    left, right, targets = torch.randn(10, 4), torch.randn(10, 4), torch.arange(10) % 2
    model = Pair()
    fedveil.Federation(model, [({"left": left, "right": right}, targets)], "plain", adam).fit(folder=tmp_path)
    predictor = fedveil.load_predictor(tmp_path, model=Pair())
    wanted = model(left, right).detach().double().softmax(1).numpy()
    for given in ({"left": left, "right": right}, {"left": left.numpy(), "right": right.double()}):
        np.testing.assert_allclose(predictor(given).probabilities, wanted, atol=1e-6)
    with pytest.raises(BadArgument, match=r"the model takes several tensors: inputs\['left'\], inputs\['right'\]"):
        export_model(predictor, tmp_path / "model.pt2")
    with pytest.raises(BadArgument, match=r"Pair does not accept them .*\n  Fix: pass records of the form inputs"):
        predictor(left)
