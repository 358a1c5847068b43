"""The folder of a run over Flower is audited by one call and by one command."""

import json

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.flower.grid import LocalGrid, parts
from tests.flower.test_flower_server import adam, app_of, net

import fedveil
from fedveil import cli
from fedveil.flower import Server
from fedveil.studies.audit.folder import STAND_IN_NOTICE

FLAGS = ["--trials", "2", "--broadcasts", "1", "--no-network", "--shadows", "0"]


def test_the_folder_of_a_run_over_flower_is_audited_by_one_call_and_by_one_command(tmp_path, capsys):
    data = parts(classes=4)
    server = Server(LocalGrid(app_of(data), 3), net(), data[0][0][:2], "veil", adam, loss="cross_entropy")
    server.fit(rounds=4, folder=tmp_path)
    report = fedveil.audit(tmp_path, model=net, trials=2, broadcasts=1, network=False, shadows=0)
    assert set(report.results) == {"veil", "undefended"}
    assert "3 clients in one process, 4 rounds" in report.notes[0]
    assert cli.main(["audit", str(tmp_path), "--model", "tests.flower.test_flower_server:net", *FLAGS]) == 0
    assert STAND_IN_NOTICE in capsys.readouterr().out
    assert json.loads((tmp_path / "audit" / "results.json").read_text())["notes"] == list(report.notes)
