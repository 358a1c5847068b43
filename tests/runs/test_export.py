"""An exported model runs without Fedveil and gives the same predictions."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runs import tables
from tests.runs.tables import write_bank, write_new

import fedveil
from fedveil import cli
from fedveil.data import Encoding
from fedveil.errors import BadArgument
from fedveil.federation.results import RunDetails
from fedveil.models import mlp
from fedveil.runs.export import export_model

PROGRAM = """
import csv, json, sys
sys.path += json.loads(sys.argv[1])  # -S leaves out what is installed, such as Fedveil
try:
    import fedveil
except ImportError:
    pass
else:
    raise SystemExit("fedveil is installed here")
import numpy as np
{encode}
folder, new = sys.argv[2:]
with open(new, newline="") as file:
    rows = list(csv.DictReader(file))
with open(f"{{folder}}/encoding.json") as file:
    encoding = json.load(file)
inputs = np.array([encode(row, encoding["inputs"]) for row in rows], dtype=np.float32)
{run}
print(json.dumps([encoding["classes"], found.tolist()]))
"""
RUN = {
    "torch": """
import torch
model = torch.export.load(f"{folder}/model.pt2").module()
found = model(torch.from_numpy(inputs)).numpy()
assert model(torch.from_numpy(inputs[:1])).shape == (1, 2)
""",
    "onnx": """
import onnxruntime
model = onnxruntime.InferenceSession(f"{folder}/model.onnx")
found = model.run(None, {"inputs": inputs})[0]
assert model.run(None, {"inputs": inputs[:1]})[0].shape == (1, 2)
""",
}
PACKAGES = [path for path in sys.path if Path(path).name == "site-packages" or (Path(path) / "onnx").is_dir()]


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    home = tmp_path_factory.mktemp("bank")
    write_bank(home / "bank.csv")
    words = ["--data", "csv", "--path", str(home / "bank.csv"), "--target", "y", "--categorical", "region"]
    words += ["--missing", "impute", "--defence", "plain", "--clients", "2", "--epochs", "5", "--quiet"]
    assert cli.main(["train", *words, "--out", str(home / "run")]) == 0
    write_new(home / "new.csv")
    predict = ["predict", str(home / "run"), str(home / "new.csv"), "--unknown", "ignore"]
    assert cli.main([*predict, "--out", str(home / "predictions.csv")]) == 0
    return home


def run_alone(folder, new, format):
    """Run an exported model in a process in which Fedveil cannot be imported, with rows encoded by its JSON alone."""
    encode = Path(tables.__file__).read_text().split("\n\n\n")[-1]
    program = PROGRAM.format(encode=encode, run=RUN[format])
    command = [sys.executable, "-S", "-P", "-E", "-W", "ignore", "-c", program, json.dumps(PACKAGES), folder, new]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("format", RUN)
def test_an_exported_model_gives_the_same_values_without_fedveil(bank, format, tmp_path, capsys):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    file = tmp_path / f"model{'.pt2' if format == 'torch' else '.onnx'}"
    assert cli.main(["export", str(bank / "run"), "--format", format, "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"model: {file}\nencoding: {tmp_path / 'encoding.json'}\n"
    classes, found = run_alone(tmp_path, bank / "new.csv", format)
    with (bank / "predictions.csv").open() as lines:
        wanted = [[float(row[f"probability_{name}"]) for name in classes] for row in csv.DictReader(lines)]
    np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
    assert len(found) == 1000


def test_the_program_without_fedveil_fails_where_fedveil_is(bank):
    command = [sys.executable, "-c", PROGRAM.format(encode="", run=""), "[]", "x", "y"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "fedveil is installed here"


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


OUTPUTS = {
    "cross_entropy": (3, torch.arange(12) % 3),
    "binary_cross_entropy": (1, torch.arange(12) % 2),
    "hinge": (3, torch.arange(12) % 3),
    "squared_error": (2, torch.arange(24.0).reshape(12, 2)),
    "poisson": (1, torch.arange(12.0)[:, None]),
}


@pytest.mark.parametrize("loss", OUTPUTS)
def test_an_exported_model_returns_predictions_for_every_kind_of_output(loss, tmp_path):
    count, targets = OUTPUTS[loss]
    x, net = torch.randn(12, 4), mlp(4, count, hidden=4)
    scale = Encoding(target_scale=(50.0, 7.0) if loss == "squared_error" else None)
    details = RunDetails(encoding=scale)
    fedveil.Federation(net, [(x, targets)], "plain", adam, loss=loss).fit(folder=tmp_path, details=details)
    predictor = fedveil.load_predictor(tmp_path, model=mlp(4, count, hidden=4))
    export_model(predictor, tmp_path / "model.pt2")
    found, wanted = torch.export.load(tmp_path / "model.pt2").module()(x), predictor(x)
    if wanted.probabilities is not None:
        np.testing.assert_allclose(found, wanted.probabilities, atol=1e-6)
    elif wanted.values is not None:
        np.testing.assert_allclose(found.squeeze(1) if count == 1 else found, wanted.values, rtol=1e-5)
        assert loss == "poisson" or wanted.values.mean() > 20
    else:
        assert found.argmax(1).tolist() == wanted.labels.tolist()
    assert all(torch.equal(one, two) for one, two in zip(predictor.model.parameters(), net.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in predictor.model.parameters())


def test_what_cannot_be_exported_is_refused(bank, tmp_path, monkeypatch, capsys):
    words = ["export", str(bank / "run"), "--out", str(tmp_path / "model.onnx"), "--format", "onnx"]
    with monkeypatch.context() as patch:
        patch.setattr("fedveil.runs.export.find_spec", lambda name: None)
        assert cli.main(words) == 2
    assert "onnx is not installed.\n  Fix: pip install 'fedveil[onnx]'" in capsys.readouterr().err
    (tmp_path / "encoding.json").write_text("{}")
    assert cli.main([*words[:3], str(tmp_path / "model.pt2")]) == 2
    assert "the file already contains the encoding of another model" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"encoding.json"}


class Fixed(torch.nn.Module):
    """A model that takes twelve records only."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x[:12]) if x.shape[0] % 2 else self.head(x)


def test_a_model_that_depends_on_the_number_of_records_is_refused(tmp_path):
    x, targets = torch.randn(12, 4), torch.arange(12) % 2
    fedveil.Federation(Fixed(), [(x, targets)], "plain", adam, batch_size=12).fit(folder=tmp_path)
    predictor = fedveil.load_predictor(tmp_path, model=Fixed())
    with pytest.raises(BadArgument, match=r"(?s)Fixed cannot be exported: .*Fix: export it in Python"):
        export_model(predictor, tmp_path / "model.pt2")
