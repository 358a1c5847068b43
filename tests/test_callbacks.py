"""Trackers log settings, the metrics of every evaluation, the page and the models, with the real packages, offline."""

import re
import struct
import sys
from pathlib import Path

import pytest
from tests.small import federation, pairs

import fedveil
from fedveil import callbacks
from fedveil.errors import BadArgument
from fedveil.federation.fitting import Tracker

FILES = ["best.safetensors", "model.safetensors", "report.html", "summary.json"]
ROUNDS, EVERY = 6, 2
EVALUATED = [2, 4, 6]


def fit(tracker, folder, rounds=ROUNDS, run=None, **options):
    run = run or federation()
    run.fit(rounds=rounds, evaluate_every=EVERY, test=pairs(5)[0], folder=folder, on_round=[tracker], **options)
    return run.history.curve("mse")


def test_tensorboard_has_settings_and_the_metrics_of_every_evaluation(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = fit(callbacks.TensorBoard(tmp_path / "board"), tmp_path / "run")
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    logged = [(event.step, event.value) for event in found.Scalars("mse")]
    assert logged == [(number, pytest.approx(value)) for number, value in curve]
    assert [number for number, _ in logged] == EVALUATED
    texts = {name: found.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert "| optimizer | Adam |" in texts["settings/text_summary"]
    assert str(tmp_path / "run" / "report.html") in texts["files/text_summary"]


def test_mlflow_has_settings_metrics_page_and_models(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    curve = fit(callbacks.MLflow("study", store, "first"), tmp_path / "run")
    with pytest.raises(BadArgument):
        fit(callbacks.MLflow("study", store, "second"), tmp_path / "run")  # the folder contains a run: nothing starts
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("study").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert (run.data.params["optimizer"], run.data.params["clients"]) == ("Adam", "2")
    history = client.get_metric_history(run.info.run_id, "mse")
    assert [(one.step, one.value) for one in history] == curve
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id)) == FILES
    copy = client.download_artifacts(run.info.run_id, "model.safetensors", str(tmp_path))
    assert Path(copy).read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


def log_entries(content, block=32768, header=7):
    """Yield the entries of a file in LevelDB's log format: blocks of (checksum, length, kind) and data."""
    place, whole = header, b""  # the file starts with a header of its own
    while place + header <= len(content):
        if block - place % block < header:  # too short for another entry
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # the whole entry, or its last part
            yield whole
            whole = b""


def test_wandb_has_settings_metrics_page_and_models_offline(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # its process starts slowly on a busy machine
    curve = fit(callbacks.WeightsAndBiases("study", mode="offline", dir=str(tmp_path)), tmp_path / "run")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [wandb_internal_pb2.Record.FromString(content) for content in log_entries(file.read_bytes())]
    rows = [{item.key or item.nested_key[0]: item.value_json for item in one.history.item} for one in records]
    assert [(int(row["_step"]), float(row["mse"])) for row in rows if "mse" in row] == curve
    config = [item for one in records for item in one.run.config.update]
    assert {item.key: item.value_json for item in config}["optimizer"] == '"Adam"'
    (artefact,) = [one.artifact for one in records if one.HasField("artifact")]
    assert sorted(entry.path for entry in artefact.manifest.contents) == FILES
    assert [one.exit.exit_code for one in records if one.HasField("exit")] == [0]


class Notes(Tracker):
    """Notes when it is called."""

    def __init__(self):
        self.calls = []

    def start(self, settings, evaluates):
        self.calls.append(("start", settings["defence"], evaluates))

    def __call__(self, record):
        self.calls.append(record.round)

    def finish(self, folder, failed):
        self.calls.append(("finish", failed, folder is not None and (folder / "report.html").is_file()))


def test_a_tracker_hears_of_the_beginning_of_every_round_and_of_the_end(tmp_path):
    notes = Notes()
    federation().fit(rounds=2, on_round=notes)
    assert notes.calls == [("start", "plain", False), 1, 2, ("finish", False, False)]
    notes = Notes()
    fit(notes, tmp_path, rounds=2)
    assert notes.calls == [("start", "plain", True), 1, 2, ("finish", False, True)]


def test_a_tracker_hears_that_a_run_failed():
    def fail(record):
        raise RuntimeError("stop")

    notes = Notes()
    with pytest.raises(RuntimeError, match="stop"):
        federation().fit(rounds=2, on_round=[notes, fail])
    assert notes.calls[-1] == ("finish", True, False)


def test_details_of_the_user_are_settings(tmp_path):
    notes = Notes()
    notes.start = lambda settings, evaluates: notes.calls.append(settings["ward"])
    fit(notes, tmp_path, rounds=1, details=fedveil.federation.results.RunDetails(settings={"ward": "B"}))
    assert notes.calls[0] == "B"
    assert '"ward": "B"' in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(("name", "package"), [("MLflow", "mlflow"), ("WeightsAndBiases", "wandb")])
def test_a_package_that_is_not_installed_is_named(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(BadArgument, match=rf"{re.escape(package)} is not installed.\n  Fix: run pip install {package}"):
        getattr(callbacks, name)()
