"""The folder of a FLARE job is audited by one call and by one command."""

import json

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.federation.test_remote import SITES, net
from tests.nvflare.test_nvflare_rounds import server_of

import fedveil
from fedveil import cli
from fedveil.studies.audit.folder import STAND_IN_NOTICE

FLAGS = ["--trials", "2", "--broadcasts", "1", "--no-network", "--shadows", "0"]


def test_the_folder_of_a_flare_job_is_audited_by_one_call_and_by_one_command(tmp_path, capsys):
    server = server_of()
    server.fit(rounds=4, folder=tmp_path)
    server.close()
    report = fedveil.audit(tmp_path, model=net, trials=2, broadcasts=1, network=False, shadows=0)
    assert set(report.results) == {"veil", "undefended"}
    assert f"{len(SITES)} clients in one process, 4 rounds" in report.notes[0]
    assert cli.main(["audit", str(tmp_path), "--model", "tests.federation.test_remote:net", *FLAGS]) == 0
    assert STAND_IN_NOTICE in capsys.readouterr().out
    assert json.loads((tmp_path / "audit" / "results.json").read_text())["notes"] == list(report.notes)
