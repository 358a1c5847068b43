"""Commands that run studies: an attack of another package, the audit's suite, and interruptions."""

import json
import re

import pytest

import fedveil.studies.study
from fedveil.cli import main, studies
from fedveil.cli.commands import find_attack
from fedveil.defences.registry import find
from fedveil.studies.paper.reproduce import EXHIBITS

GUESS, OWN = "tests.cli.guessing:GUESS", "tests.cli.guessing:Own"


def test_an_own_attack_runs_and_its_repeat_command_asks_for_the_same(tmp_path, capsys):
    folder = tmp_path / "my results"
    words = ["attack", GUESS, "--defence", f"plain,{OWN}", "--guesses", "5", "--out", str(folder), "--workers", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^plain +5 +3$", out, re.MULTILINE)
    assert f"report: {folder / 'report.html'}" in out
    repeat = re.search(r"^repeat: (.*)", out, re.MULTILINE)[1]
    assert f"--guesses 5 --out '{folder}'" in repeat
    assert f"--data cifar10 --train-size 100 --clients 3 --loss cross_entropy --defence plain,{OWN}" in repeat
    assert json.loads((folder / "results.json").read_text())["command"] == repeat
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {"defence": "plain", "guesses": "5", "clients": "3"}
    assert type(find_attack("tests.cli.guessing:GuessStudy")) is type(find_attack(GUESS))


def test_an_audit_without_a_federation_is_that_of_the_suite_and_help_names_every_exhibit(tmp_path):
    def is_suite(*words):
        return studies.AuditCommand.parse("fedveil audit", words).is_suite

    assert is_suite()
    assert is_suite("--defence", "plain", "--trials", "1", "--out", "x")
    for words in (["--data", "digits"], ["--no-permute"], ["--clients=3"], [str(tmp_path)], ["--run", str(tmp_path)]):
        assert not is_suite(*words)
    assert re.findall(r"(?:table|fig)\d", studies.EXHIBITS_HELP) == list(EXHIBITS)


def test_ctrl_c_is_one_line_that_says_how_to_continue(monkeypatch, capsys, tmp_path):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(fedveil.studies.study, "gather", interrupt)
    assert main(["attack", GUESS, "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert captured.err.strip() == "fedveil: stopped; run the same command again to continue"
    assert captured.out == ""


@pytest.mark.parametrize("words", [["--epochs", "1", "--train-size", "50"], [GUESS, "--workers", "1"]])
def test_what_cannot_be_written_is_an_error_with_where_and_fix(words, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["attack" if GUESS in words else "train", *words, "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.match(rf"fedveil: {tmp_path}/file\S*: cannot be written: .*\n  Fix: .*another folder", captured.err)


@pytest.mark.parametrize(
    ("module", "name", "flags"),
    [
        ("nvflare", "nvflare:PercentilePrivacy", ["--gamma", "0.005"]),
        pytest.param("flwr", "flower:LocalDpMod", ["--message-epsilon", "20.0"], marks=pytest.mark.slow),
    ],
)
def test_a_deployed_defence_is_audited_with_its_package_s_code_and_its_claim_is_shown(
    module, name, flags, tmp_path, capsys
):
    pytest.importorskip(module)
    few = ["--no-network", "--no-server", "--shadows", "0", "--trials", "2", "--workers", "1"]
    data = ["--data", "digits", "--train-size", "60", "--epochs", "1", "--clients", "2", "--loss", "squared_error"]
    assert main(["audit", *data, "--defence", name, *flags, *few, "--out", str(tmp_path)]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert re.search(rf"^{name} +rounds stacked .* \d+\.\d \[", out, re.MULTILINE)
    assert f"{name}: {find(name).claim}." in " ".join(out.split())
    assert "Claims of the authors" in page
    assert " ".join(flags) in re.search(r"^repeat: (.*)", out, re.MULTILINE)[1]
    run = str(tmp_path / name.replace(":", ".") / "run")  # its name is not code that could come from anyone
    assert main(["audit", run, *few]) == 0
