"""Files whose values are nested too deeply are refused by name, or count as damaged."""

import fcntl
from dataclasses import dataclass

import pytest
from tests.configs import config_of
from tests.small import SMALL, federation

from fedveil import load_model
from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.runs.folder import is_finished, read_config, train
from fedveil.studies.jobs import Result, StudyJob, read_result
from fedveil.studies.paper import reproduce as paper
from fedveil.studies.paper.plan import read_plan

DEEP = 100_000
JSON = "[" * DEEP + "]" * DEEP
TEXTS = {
    "arrays.toml": f"x = {JSON}\n",
    "names.toml": ".".join(["a"] * 3000) + " = 1\n",
    "objects.json": '{"a":' * DEEP + "1" + "}" * DEEP,
    "within.json": '{"data": {"labels": ' + "[" * 800 + "]" * 800 + "}}",
}
LEVELS = "nested more than 100 levels deep"


@pytest.mark.parametrize("name", TEXTS)
def test_a_configuration_is_refused_by_its_name(tmp_path, name, capsys):
    path = tmp_path / name
    path.write_text(TEXTS[name])
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    assert f"{path}: its values are {LEVELS}" in capsys.readouterr().err


def test_files_of_a_run_are_refused_by_their_names(tmp_path):
    (tmp_path / "config.json").write_text('{"data": 1' + "0" * 5000 + "}")
    with pytest.raises(BadArgument, match=r"config\.json: invalid JSON: Exceeds the limit"):
        read_config(tmp_path)
    folder = tmp_path / "run"
    train(config_of(**SMALL, epochs=1), folder)
    kept = {name: (folder / name).read_text() for name in ("config.json", "encoding.json", "summary.json")}
    assert is_finished(read_config(folder), folder)
    for name, text in kept.items():
        (folder / name).write_text(JSON)
        if name == "summary.json":
            assert not is_finished(read_config(folder), folder)
        else:
            with pytest.raises(BadArgument, match=rf"(?s){name}.*{LEVELS}"):
                load_model(folder)
        (folder / name).write_text(text)


def test_the_records_in_a_checkpoint_are_refused_and_the_holder_of_a_lock_is_another_process(tmp_path):
    federation().fit(rounds=1, folder=tmp_path)
    belongs, state = checkpoint.read(tmp_path / checkpoint.LAST)
    checkpoint.save(tmp_path / checkpoint.LAST, {**state, "records": JSON}, belongs)
    with pytest.raises(BadArgument, match=f"{tmp_path}: its values are {LEVELS}"):
        federation().resume(tmp_path)
    (tmp_path / ".holder").write_text(JSON)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadArgument, match="another process is using this folder"):
            federation().save(tmp_path)


@dataclass(frozen=True)
class Nothing(Result):
    pass


def test_results_that_cannot_be_read_are_computed_again(tmp_path):
    (tmp_path / "one.json").write_text(JSON)
    assert read_result(StudyJob("one", lambda progress, done: Nothing(), Nothing), tmp_path) is None
    (tmp_path / "table1.json").write_text(JSON)
    assert paper.read_exhibit(read_plan("table1", "quick"), tmp_path) is None
