"""The result of a run as people read it: the page, its verdict, and what the command prints."""

import re

import pytest
import torch
from tests.configs import config_of

import fedveil
from fedveil.cli import main
from fedveil.federation import checkpoint, run_folder
from fedveil.runs.folder import open_run, train


def test_the_page_of_a_run_has_its_own_figures(tmp_path):
    small = {"data": "digits", "train_size": 100, "test_size": 100, "clients": 2, "hidden": 12, "lr": 0.02}
    for epochs in (1, 20):
        summary = train(config_of(epochs=epochs, **small), tmp_path / str(epochs))
        page = (tmp_path / str(epochs) / "report.html").read_text()
        accuracy = f"test accuracy {100 * summary.metrics['accuracy']:.1f} %"
        assert f"<title>digits, mlp, veil: {accuracy} \N{EN DASH} Fedveil</title>" in page
        assert f"{accuracy.capitalize()}; a client&#39;s copy has" in page


def test_a_run_prints_its_result_and_where_the_report_is(tmp_path, capsys):
    words = ["--epochs", "1", "--defence", "plain", "--data", "diabetes", "--out", str(tmp_path / "r")]
    assert main(["train", *words]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"100% epoch: 1\.0/1, mse \d\.\d{4}\n", captured.err)  # lines for a log, no live one
    assert "rmse, unscaled" in captured.out
    assert f"report         {tmp_path / 'r' / 'report.html'}" in captured.out
    assert (tmp_path / "r" / "report.html").read_text().startswith("<!doctype html>")


def test_kept_noise_is_drawn_again_when_a_run_is_resumed_and_its_page_says_so(tmp_path):
    given = {"clients": 2, "hidden": 8, "train_size": 60, "batch_size": 15, "groups": 10, "keep_noise": True}
    for epochs in (1, 2):
        summary = train(config_of(epochs=epochs, **given), tmp_path, resume=epochs > 1)
        page = (tmp_path / "report.html").read_text()
        assert "the same in all rounds" in page
        assert ("drawn at least 2 times, because the run was resumed" in page) == (epochs > 1)
        assert "--keep-noise" in summary.repeat
    assert checkpoint.load(tmp_path / "checkpoint.pt")["defence"] == {"name": "veil", "draws": 2}
    directions = []
    for _ in range(2):
        _, federation = open_run(tmp_path)
        sent = [federation.defence_server.start_round(federation.model).broadcast.head.direction for _ in range(2)]
        assert torch.equal(*sent)
        directions.append(sent[0])
    assert not torch.equal(*directions)


@pytest.mark.parametrize("monitor", [None, "f1"])
def test_the_live_page_names_the_metric_that_decides(tmp_path, monkeypatch, monitor):
    monkeypatch.setattr(run_folder, "INTERVAL", 0.0)
    monkeypatch.setattr(run_folder, "PAUSE_FACTOR", 0)
    features = torch.randn(90, 4)
    records = (features, (features[:, 0] > 0).long())
    shown = []

    def look(record):
        shown.append((tmp_path / "report.html").read_text())

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    federation = fedveil.Federation(model, [records], "veil", batch_size=30)
    federation.fit(epochs=3, validation=records, test=records, monitor=monitor, folder=tmp_path, on_round=look)
    best = federation.history.curve(f"validation_{monitor or 'accuracy'}")
    assert len(best) == 3
    text = f"Validation {monitor} {best[0][1]:.3g}" if monitor else f"Validation accuracy {100 * best[0][1]:.1f} %"
    assert f"{text} after round 3." in shown[3]
