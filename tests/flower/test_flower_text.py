"""Text classifiers over Flower train as plain ones in one process, and their reports state the coverage."""

import json
import logging
import re

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from benchmarks.networks.encoders import EncoderClassifier
from benchmarks.networks.recurrent import LstmClassifier
from benchmarks.tasks import TOPICS, VOCABULARY, WORDS, passages
from tests.flower.grid import LocalGrid
from tests.flower.test_flower_server import app_of
from tests.oracle import built, worst

from fedveil.data import from_records
from fedveil.federation import Federation
from fedveil.flower import Server
from fedveil.runs.folder import record_run

BUILD = {
    "lstm": lambda: LstmClassifier(vocabulary=VOCABULARY, width=8, hidden=8, classes=len(TOPICS)),
    "transformer": lambda: EncoderClassifier(
        vocabulary=VOCABULARY, length=WORDS, width=8, heads=2, feedforward=16, layers=1, classes=len(TOPICS)
    ),
}
ROUNDS = 4


def parts():
    ids, labels = passages()
    sizes = (60, 40, 20)
    records = list(zip(ids[:120].split(sizes), labels[:120].split(sizes), strict=True))
    return records, (ids[120:200], labels[120:200])


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.parametrize("name", BUILD)
def test_a_text_classifier_trains_over_flower_as_a_plain_one_does_in_one_process(name, tmp_path, caplog):
    clients, test = parts()
    plain = Federation(built(BUILD[name]), clients, "plain", sgd, loss="cross_entropy", batch_size=10, whole_shard=True)
    plain.fit(rounds=ROUNDS, test=test)
    app = app_of(clients, lambda: built(BUILD[name]))
    with caplog.at_level(logging.INFO, logger="fedveil"):
        server = Server(
            LocalGrid(app, 3), built(BUILD[name]), clients[0][0][:2], "veil", sgd, loss="cross_entropy", batch_size=10
        )
    assert "% scaled or with additive noise" in caplog.text
    data = from_records("help texts", clients[0], test, classes=TOPICS)
    config = {"clients": 3, "model": name}
    summary = record_run(server, tmp_path, data, config, "repeat", rounds=ROUNDS).to_dict()
    assert worst(server.model.state_dict(), plain.model.state_dict()) < 1e-9
    assert summary["accuracy"] == plain.history.last["accuracy"]
    shares = [summary[kind] for kind in ("scaled", "signed", "moved", "bare")]
    assert sum(shares) == pytest.approx(1)
    assert json.loads((tmp_path / "summary.json").read_text())["bare"] == summary["bare"]
    page = (tmp_path / "report.html").read_text()
    assert "What the veil perturbs" in page
    assert re.search(rf"{100 * summary['scaled']:.1f} %", page)
