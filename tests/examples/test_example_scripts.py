"""Every example runs from any folder, leaves nothing there, and ends with the line that its header promises."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedveil import Federation
from fedveil.cli import main
from fedveil.models import mlp

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LONGEST = 95  # lines, without the text of notebooks
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
BOUNDS = {  # of the numbers in the last line, in their order
    "audit_own_defence": [],
    "custom_training_loop": [(90, 100), (1e-9, 1e-5)],
    "deployment": [(40, 40), (2, 2), (90, 100)],
    "image_classification": [(95, 100), (95, 100), (98, 100)],
    "huggingface": [(90, 100), (90, 100)],
    "lora": [(85, 100), (85, 100), (80, 120), (5, 30)],
    "segmentation": [(0.82, 1), (0.82, 1), (96, 100), (96, 100)],
    "tabular_regression": [(45, 62), (45, 62), (65, 85)],
    "text_classification": [(97, 100)] * 4,
}
INSTALLED = {"fedveil", "numpy", "sklearn", "torch"}
EXTRAS = {
    "deployment": {"nvflare", "deployment"},
    "huggingface": {"tokenizers", "transformers"},
    "image_classification": {"IPython"},  # in a notebook only
}
WITHOUT = {"huggingface"} if importlib.util.find_spec("transformers") is None else set()  # their packages are missing
PAIRS = {
    "image_classification": 0.6,
    "lora": 1.0,
    "segmentation": 0.03,
    "tabular_regression": 0.2,
    "text_classification": 1.0,
}
"""How far plain and veil, which follow each other in the last line, may be apart."""
QUICK = ("custom_training_loop", "tabular_regression")  # a second or two where torch is there already


def header(name):
    """What a header says, by its first words."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    return {key: words.strip("`") for key, words in re.findall(r"^- ([\w ]+): (.*)$", text, re.MULTILINE)}


def check(name, line):
    """The line has the header's words, and numbers within bounds."""
    assert NUMBER.sub("#", line) == NUMBER.sub("#", header(name)["Last line"])
    found = [float(number) for number in NUMBER.findall(line)]
    for number, (low, high) in zip(found, BOUNDS[name], strict=True):
        assert low <= number <= high, line
    if name in PAIRS:
        assert abs(found[0] - found[1]) <= PAIRS[name], line


def check_claims(name, printed):
    """What an example's text says of other lines."""
    if name == "image_classification":
        shares = {who: float(share) for who, share in re.findall(r"^(.*): (.*) % right$", printed, re.MULTILINE)}
        assert shares["as received by a client"] < 40
        assert shares["public offset removed"] > 85
    if name == "audit_own_defence":
        shares = dict(re.findall(r"^(.*?) +agrees with the server's model on +(.*) %", printed, re.MULTILINE))
        assert float(shares["outputs calibrated"]) > 95
        assert set(shares) == {"as published", "broadcasts averaged", "outputs calibrated", "(undefended)"}


def run(command, folder):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_every_script_is_known_here_and_in_the_index():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(BOUNDS)
    index = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in index for name in BOUNDS)


@pytest.mark.parametrize("name", BOUNDS)
def test_an_example_is_short_imports_what_fedveil_installs_and_says_how_it_ends(name):
    text, extra = (EXAMPLES / f"{name}.py").read_text(), EXTRAS.get(name, set())
    assert set(header(name)) == {"Shows", "Who attacks", "Needs", "Last line"}
    check(name, header(name)["Last line"])
    code = re.sub(r'^# %% \[markdown\]\n""".*?^"""\n', "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) <= LONGEST
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in names} <= {*sys.stdlib_module_names, *INSTALLED, *extra}
    assert ("fedveil[" in header(name)["Needs"]) == ("nvflare" in extra)


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_example_ends_as_its_header_says(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = compile((EXAMPLES / f"{name}.py").read_text(), name, "exec")
    with torch.random.fork_rng():
        exec(code, {"__name__": "__main__"})
    check(name, capsys.readouterr().out.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BOUNDS) - WITHOUT))
def test_an_example_runs_from_any_folder(name, tmp_path):
    if name == "deployment":
        pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")
    strict = [] if name in ("deployment", "huggingface") else ["-W", "error"]
    done = run([*strict, EXAMPLES / f"{name}.py"], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(name, done.stdout.splitlines()[-1])
    check_claims(name, done.stdout)
    assert not list(tmp_path.iterdir())


def test_the_deployment_says_what_to_install(tmp_path):
    hidden = "import runpy, sys; sys.modules['nvflare'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run(["-c", hidden, EXAMPLES / "deployment.py"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "deployment.py needs NVIDIA FLARE: pip install 'fedveil[nvflare]'\n"


def test_the_audited_defence_loses_nothing():
    names, ends = {}, []
    exec((EXAMPLES / "audit_own_defence.py").read_text().partition('"""## The audit')[0], names)
    chance = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 5, generator=chance), torch.randn(8, 3, generator=chance)) for _ in range(2)]
    for defence in ("plain", names["Shifted"]()):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = mlp(5, 3, hidden=4).double()
            Federation(model, clients, defence, torch.optim.SGD(model.parameters(), lr=1e-2)).fit(rounds=3)
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def commands(name):
    """The commands of fedveil in an example's text."""
    return re.findall(r"(?:`|command line: )(fedveil \w+ [^`\n]+)", (EXAMPLES / f"{name}.py").read_text())


@pytest.mark.slow
def test_the_table_is_trained_on_by_the_command_too(tmp_path, monkeypatch, capsys):
    (command,) = commands("tabular_regression")
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.random.fork_rng():
        exec((EXAMPLES / "tabular_regression.py").read_text(), names)
    names["write_patients"](tmp_path / "patients.csv")
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    (summary,) = tmp_path.glob("runs/*/summary.json")
    low, high = BOUNDS["tabular_regression"][0]
    assert low < json.loads(summary.read_text())["rmse"] < high


@pytest.mark.slow
def test_the_defence_is_audited_by_the_command_too(tmp_path, monkeypatch, capsys):
    (command,) = commands("audit_own_defence")
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "audit_own_defence.py").read_text()
    (tmp_path / "my_module.py").write_text(text.partition('"""## The audit')[0])
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*shlex.split(command)[1:], "--workers", "1", "--epochs", "20", "--trials", "1", "--no-server"]) == 0
    assert "the model: LEAK" in " ".join(capsys.readouterr().out.split())
