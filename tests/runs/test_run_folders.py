"""Python, the command line, Flower and FLARE write the same folder, and every use of a folder accepts it."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engines import LoopbackServer
from torch import nn

import fedveil
from fedveil import cli
from fedveil.data import from_records
from fedveil.errors import BadArgument
from fedveil.federation.status import read_status

EVERYWHERE = {
    "config.json",
    "encoding.json",
    "metrics.jsonl",
    "summary.json",
    "status.json",
    "audit.json",
    "report.html",
}
EVERYWHERE |= {"model.safetensors", "best.safetensors", "checkpoint.pt", "checkpoint.previous.pt"}
HERE = "tests.runs.test_run_folders"
CLIENTS, SIZE = 3, 20
QUICK = {"trials": 2, "broadcasts": 1, "network": False, "shadows": 0}


class Net(nn.Sequential):
    """A network that is built without arguments."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def new_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def records(number):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(SIZE, 6, generator=generator)
    return inputs, inputs[:, :4].argmax(1)


def parts():
    return [records(number) for number in range(CLIENTS)]


def data():
    joined = tuple(torch.cat(columns) for columns in zip(*parts(), strict=True))
    return from_records("points", joined, records(CLIENTS))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def in_python():
    return fedveil.Federation(new_net(), parts(), "veil", adam, batch_size=SIZE)


def on_flower():
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")
    from tests.flower.grid import LocalGrid
    from tests.flower.test_flower_server import app_of

    from fedveil.flower import Server

    own = parts()
    grid = LocalGrid(app_of(own, new_net), CLIENTS)
    return Server(grid, new_net(), own[0][0][:2], "veil", adam, loss="cross_entropy")


def on_flare():
    pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")
    from tests.nvflare.sites import Own, sites

    from fedveil.nvflare.engine import FlareTransport

    proxies, _, _ = sites({f"site-{k + 1}": Own(new_net, own, k) for k, own in enumerate(parts())})
    example = parts()[0][0][:2]
    return LoopbackServer(FlareTransport(proxies), new_net(), example, "veil", adam, loss="cross_entropy")


SERVERS = {"python": in_python, "flower": on_flower, "flare": on_flare}
ENGINES = [*SERVERS, "command line"]


def train(engine, folder, rounds):
    """Train, or continue, the run in a folder; an epoch is one round."""
    if engine in SERVERS:
        server = SERVERS[engine]()
        server.fit(rounds=rounds, test=records(CLIENTS), folder=folder, resume=True)
        server.close()
        return
    again = ["--resume"] if (folder / "config.json").exists() else []
    named = ["--data", f"{HERE}:data", "--model", f"{HERE}:Net", "--clients", str(CLIENTS), "--lr", "0.01"]
    assert cli.main(["train", *named, "--epochs", str(rounds), "--out", str(folder), *again]) == 0


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_writes_the_same_files(engine, tmp_path):
    train(engine, tmp_path, 2)
    found = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert found - {"clients"} == EVERYWHERE
    assert [line["round"] for line in lines(tmp_path)] == [1, 2]
    summary, status = json.loads((tmp_path / "summary.json").read_text()), read_status(tmp_path)
    assert (summary["rounds"], status.state, status.round, status.rounds) == (2, "finished", 2, 2)
    assert summary["accuracy"] == status.metrics["accuracy"] == lines(tmp_path)[-1]["accuracy"]
    page = (tmp_path / "report.html").read_text()
    assert f"Test accuracy {100 * summary['accuracy']:.1f} %" in page
    assert 'http-equiv="refresh"' not in page


def resume(engine, folder, capsys):
    train(engine, folder, 4)
    assert [line["round"] for line in lines(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 4


def load(engine, folder, capsys):
    values = load_file(folder / "model.safetensors")
    for found in (fedveil.load_model(folder, trust_code=True), fedveil.load_model(folder, model=Net())):
        assert all(torch.equal(own, values[name]) for name, own in found.state_dict().items())
    best = fedveil.load_model(folder, best=True, model=Net()).state_dict()
    assert all(torch.equal(own, best[name]) for name, own in load_file(folder / "best.safetensors").items())
    with pytest.raises(BadArgument, match="code"):
        fedveil.load_model(folder)


def audit(engine, folder, capsys):
    report = fedveil.audit(folder, trust_code=True, **QUICK)
    assert set(report.results) == {"veil", "undefended"}
    assert report.verdicts["veil"].keys() >= {"the model", "membership"}


def predict(engine, folder, capsys):
    x, _ = records(CLIENTS + 1)
    network = Net()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    wanted = network(x).double().softmax(1).detach().numpy()
    found = fedveil.load_predictor(folder, model=Net())(x)
    np.testing.assert_allclose(found.probabilities, wanted, atol=1e-6)
    assert [int(label) for label in found.labels] == wanted.argmax(1).tolist()
    np.save(folder / "new.npy", x.numpy())
    words = ["predict", str(folder), str(folder / "new.npy"), "--out", str(folder / "new.csv")]
    capsys.readouterr()
    assert cli.main(words) == 2  # without --network, its code would be imported
    assert "--trust-code" in capsys.readouterr().err
    assert cli.main([*words, "--network", f"{HERE}:Net"]) == 0
    rows = list(csv.DictReader((folder / "new.csv").read_text().splitlines()))
    printed = [[float(row[f"probability_{number}"]) for number in range(4)] for row in rows]
    np.testing.assert_array_equal(printed, found.probabilities)
    encoding = json.loads((folder / "encoding.json").read_text())  # no statistics of the clients' records
    assert encoding == {
        "schema": 1,
        "inputs": {"columns": [], "kind": "numbers"},
        "target": "",
        "classes": encoding["classes"],
        "target_scale": None,
        "tensors": {"inputs": {"shape": [6], "dtype": "float32"}},
        "outputs": {"kind": "softmax", "shape": [4], "class_axis": -1, "entry": ""},
    }
    assert list(map(str, encoding["classes"])) == list("0123")


USES = [resume, predict, audit, load]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_use_of_a_folder_accepts_those_of_every_engine(engine, use, tmp_path, capsys):
    train(engine, tmp_path, 2)
    use(engine, tmp_path, capsys)


@pytest.mark.parametrize("engine", ["python", "command line"])
def test_a_configuration_can_be_repeated_only_if_the_command_line_wrote_it(engine, tmp_path, capsys):
    train(engine, tmp_path, 1)
    words = ["train", str(tmp_path / "config.json"), "--trust-code", "--out", str(tmp_path / "again")]
    if engine == "command line":
        assert cli.main(words) == 0
        return
    assert cli.main(words) == 2
    assert "this run was started by a Python program" in capsys.readouterr().err
    settings = json.loads((tmp_path / "config.json").read_text())["python"]
    assert (settings["model"], settings["defence"], settings["clients"]) == (f"{HERE}:Net", "veil", CLIENTS)
