"""One call audits a federation in memory and the folder of any run; what is simulated or made up is said."""

import dataclasses
import json
import math
import sys
import types

import pytest
import torch
from tests.engines import Loopback, LoopbackServer, member
from torch import nn

import fedveil
from fedveil import cli
from fedveil.defences import Plain
from fedveil.errors import BadArgument
from fedveil.federation.description import DESCRIPTION, read_description
from fedveil.models import mlp
from fedveil.studies.audit.call import AuditReport
from fedveil.studies.audit.folder import STAND_IN_NOTICE
from fedveil.studies.audit.training import TrainingRecipe, reinitialise
from fedveil.studies.verdicts import Label

FEATURES, CLASSES = 6, 3
QUICK = {"trials": 2, "broadcasts": 1, "network": False, "shadows": 0}
FLAGS = ["--trials", "2", "--broadcasts", "1", "--no-network", "--shadows", "0", "--workers", "1"]


class Net(nn.Module):
    """A network that is built without arguments."""

    def __init__(self):
        super().__init__()
        self.body = mlp(FEATURES, CLASSES, hidden=8)

    def forward(self, inputs):
        return self.body(inputs)


class Noisy(Plain):
    """A defence of another package, which nobody registered."""

    def __init__(self, scale=0.1):
        super().__init__()
        self.scale = scale

    def client_view(self, model, broadcast):
        view = super().client_view(model, broadcast)
        with torch.no_grad():
            for value in view.parameters():
                value += self.scale * torch.randn_like(value)
        return view


def own_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def records(count=30, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, FEATURES, generator=rng), torch.randint(0, CLASSES, (count,), generator=rng)


def clients():
    return [records(seed=1), records(seed=2)]


TEST = records(60, seed=3)


def trained(defence="veil", rounds=8, **options):
    found = fedveil.Federation(Net(), clients(), defence, lambda p: torch.optim.Adam(p, 1e-2), batch_size=10, **options)
    found.fit(rounds=rounds)
    return found


def values_of(federation):
    tensors = [*federation.model.state_dict().values()]
    return [value.clone() for value in tensors], federation.round, len(federation.history.records)


def test_a_federation_in_memory_is_audited_and_not_changed():
    federation = trained(privacy=None)
    before, number, length = values_of(federation)
    report = fedveil.audit(federation, TEST, **QUICK)
    after = values_of(federation)
    assert all(torch.equal(a, b) for a, b in zip(before, after[0], strict=True))
    assert after[1:] == (number, length)
    assert set(report.results) == {"veil", "undefended"}
    assert report.verdicts["veil"]["the model"].label in set(Label)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.command = "another"
    assert repr(report).splitlines()[0] == "Audit of Net, veil, 2 clients"
    assert any(line.startswith("  veil, membership: ") for line in repr(report).splitlines())


def test_own_model_loss_optimizer_and_defence_instance_are_used():
    optimizer = lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)  # noqa: E731
    federation = fedveil.Federation(Net(), clients(), Noisy(0.2), optimizer, loss=own_loss, batch_size=10)
    federation.fit(rounds=6)
    report = fedveil.audit(federation, TEST, **QUICK)
    assert set(report.results) == {"Noisy", "undefended"}
    attackers = report.results["Noisy"].attackers
    assert {"as published", "broadcasts averaged"} <= set(attackers)  # the generic attackers
    facts = next(section for section in report.presentation.sections if section.title == "Configuration").facts
    assert (facts["loss"], facts["optimizer"], facts["defence"]) == ("own_loss", "SGD", "plain")


def test_shadows_are_trained_under_a_defence_that_is_not_registered():
    report = fedveil.audit(trained(Noisy(0.2)), TEST, **QUICK | {"shadows": 2})
    for name in ("Noisy", "undefended"):
        assert "RMIA" in report.results[name].attackers["as published"].membership.attacks


def test_a_model_in_float64_is_audited_in_float32():
    federation = fedveil.Federation(Net().double(), clients(), "veil", torch.optim.Adam, batch_size=10)
    federation.fit(rounds=3)
    assert fedveil.audit(federation, TEST, **QUICK).notes == (
        "The model's dtype is torch.float64; a float32 copy was audited.",
    )
    assert federation.dtype == torch.float64
    assert next(federation.model.parameters()).dtype == torch.float64


def test_private_defences_keep_their_budget():
    federation = trained("plain", rounds=4, privacy=fedveil.Privacy(epsilon=5.0, rounds=4, rate=0.5))
    spent = federation.defence.accountant.rounds
    report = fedveil.audit(federation, TEST, **QUICK)
    assert federation.defence.accountant.rounds == spent
    assert set(report.results) == {"plain"}


def test_the_frame_has_every_figure_and_the_page_has_results_beside_it(tmp_path):
    pandas = pytest.importorskip("pandas")
    report = fedveil.audit(trained(), TEST, **QUICK)
    frame = report.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame) == ["defence", "attacker", "figure", "value", "low", "high"]
    assert {"agreement, %", "membership AUC"} <= set(frame.figure)
    page = report.page(tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert page == tmp_path / "report.html"
    assert stored["schema"] == 1
    assert stored["conclusion"] in page.read_text()
    assert list(stored["answers"]) == list(report.answers)
    assert stored["verdicts"]["veil"]["membership"]["label"] == report.verdicts["veil"]["membership"].label


def refuse(match, *args, **options):
    with pytest.raises(BadArgument, match=match):
        fedveil.audit(*args, **QUICK | options)


def test_what_is_missing_or_contradicts_is_refused():
    refuse("there are no test records", trained())
    refuse("clients= applies only to a folder", trained(), TEST, clients=clients())
    refuse("has not been trained", fedveil.Federation(Net(), clients()), TEST)
    refuse("model= must be a function, got a model", trained(), TEST, model=Net())


@pytest.fixture
def folder(tmp_path):
    trained(rounds=8).fit(rounds=9, folder=tmp_path)
    return tmp_path


def test_the_folder_of_a_python_run_with_its_records_is_the_run_itself(folder):
    report = fedveil.audit(folder, TEST, clients=clients(), model=Net(), **QUICK)
    assert report.notes == ()
    in_memory = fedveil.Federation(Net(), clients(), "veil", lambda p: torch.optim.Adam(p, 1e-2), batch_size=10)
    in_memory.resume(folder)
    same = fedveil.audit(in_memory, TEST, **QUICK)
    figures = [one.results["undefended"].attackers["as published"].accuracy for one in (report, same)]
    assert figures[0] == figures[1]


def test_a_folder_with_other_records_or_none_is_simulated_and_says_so(folder, capsys):
    report = fedveil.audit(folder, TEST, clients=[records(seed=7), records(seed=8)], model=Net, **QUICK)
    assert "A simulation was audited, not the run itself: 2 clients in one process, 9 rounds" in report.notes[0]
    assert "which may not be the records that this run was trained on" in report.notes[0]
    report = fedveil.audit(folder, model=Net, **QUICK)
    assert report.notes[0].startswith(STAND_IN_NOTICE)
    assert report.presentation.page("").verdict.startswith(STAND_IN_NOTICE)
    assert next(iter(report.answers.values()))[0].startswith("This page cannot answer this question for your data")
    assert cli.main(["audit", str(folder), "--model", f"{__name__}:Net", *FLAGS]) == 0
    assert STAND_IN_NOTICE in capsys.readouterr().out
    stored = json.loads((folder / "audit" / "results.json").read_text())
    assert stored["notes"][0].startswith(STAND_IN_NOTICE)


def test_a_command_takes_the_clients_of_a_factory(folder, capsys, monkeypatch):
    module = types.ModuleType("own_site")
    module.load, module.Net = lambda: (clients(), TEST), Net
    monkeypatch.setitem(sys.modules, "own_site", module)
    assert cli.main(["audit", str(folder), "--data", "own_site:load", "--model", "own_site:Net", *FLAGS]) == 0
    printed = capsys.readouterr().out
    assert "simulation" not in printed
    (repeat,) = [line for line in printed.splitlines() if line.startswith("repeat: ")]
    wanted = (
        f"--run {folder} --data own_site:load --model own_site:Net --trials 2 --broadcasts 1 --no-network --shadows 0"
    )
    assert repeat == f"repeat: fedveil audit {wanted}"
    assert json.loads((folder / "audit" / "results.json").read_text())["notes"] == []


def test_code_that_a_folder_names_needs_trust(folder):
    assert read_description(folder).factory == f"{__name__}:Net"
    refuse("importing it would run that module's code", folder)
    assert isinstance(fedveil.audit(folder, trust_code=True, **QUICK), AuditReport)
    with pytest.raises(BadArgument, match="belongs to another network"):
        fedveil.audit(folder, model=mlp(FEATURES, CLASSES, hidden=9), **QUICK)


def rewrite(folder, **changes):
    path = folder / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_folder_of_another_version_is_read_if_its_schema_is_known(folder, capsys):
    rewrite(folder, version="0.0.9")
    report = fedveil.audit(folder, TEST, clients=clients(), model=Net, **QUICK)
    assert report.notes == ("This run was written by Fedveil 0.0.9.",)
    assert cli.main(["audit", str(folder), "--model", f"{__name__}:Net", *FLAGS]) == 0
    assert "This run was written by Fedveil 0.0.9." in capsys.readouterr().out
    rewrite(folder, schema=2)
    refuse("was written by Fedveil 0.0.9 with a schema other than 1", folder, model=Net)
    assert cli.main(["audit", str(folder), *FLAGS]) == 2
    assert "a schema other than" in capsys.readouterr().err
    (folder / DESCRIPTION).unlink()
    refuse("neither config.json nor audit.json", folder, model=Net)
    rewrite_config = folder / "config.json"
    rewrite_config.write_text('{"schema": 9}')
    refuse("has schema 9", folder)


def test_the_run_of_a_remote_server_is_simulated(tmp_path, capsys):
    """A remote server knows neither records nor classes, and clients need not be in its process."""
    parts = clients()
    members = {f"site-{k}": member(Net, own, k) for k, own in enumerate(parts)}
    server = LoopbackServer(Loopback(members), Net(), parts[0][0][:2], "veil", loss="cross_entropy", batch_size=8)
    server.fit(rounds=5, folder=tmp_path)
    found = read_description(tmp_path)
    assert (found.terms.remote, found.terms.clients, found.terms.sizes) == (True, 2, None)
    assert (found.shape, found.classes, found.terms.whole_shard) == ([FEATURES], CLASSES, True)
    report = fedveil.audit(tmp_path, TEST, clients=parts, model=Net, **QUICK)
    assert "on the records that were passed." in report.notes[0]
    assert "2 clients in one process, 5 rounds" in report.notes[0]
    assert cli.main(["audit", str(tmp_path), "--epochs", "3", *FLAGS]) == 2
    assert "--epochs cannot be changed" in capsys.readouterr().err


def test_training_anew_repeats_the_learning_rates_and_starts_from_other_values():
    falling = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    federation = trained("plain", rounds=6, schedule=falling, schedule_every="round")
    rates = tuple(record.lr for record in federation.history.records)
    recipe = TrainingRecipe(federation, rates)
    again = recipe.train([fedveil.data.dataset.DataPart(*own) for own in clients()], 5, lambda done, step: None)
    found = [record.lr for record in again.history.records]
    assert found == pytest.approx(rates, rel=1e-12)
    assert rates[-1] == pytest.approx(1e-2 * 0.5**5, rel=1e-12)
    started = recipe.new_model_and_optimizer(5)[0]
    assert all(not torch.equal(a, b) for a, b in zip(started.parameters(), federation.model.parameters(), strict=True))
    assert again.optimizer is not federation.optimizer


def test_reset_models_keep_frozen_values_and_modules_without_reset_are_refused():
    model = mlp(FEATURES, CLASSES, hidden=8)
    frozen = next(model.parameters()).requires_grad_(False)
    before = [value.detach().clone() for value in model.parameters()]
    reinitialise(model)
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert same[0]
    assert not any(same[1:])
    assert frozen is next(model.parameters())

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(FEATURES))

        def forward(self, inputs):
            return super().forward(self.scale * inputs)

    federation = fedveil.Federation(Scaled(), clients(), "plain", batch_size=10)
    federation.fit(rounds=3)
    report = fedveil.audit(federation, TEST, **QUICK | {"shadows": 2})
    assert "No shadow federations were trained" in report.notes[0]
    assert "has no reset_parameters" in report.notes[0]
    report = fedveil.audit(federation, TEST, **QUICK | {"shadows": 2, "model": Scaled})
    assert report.notes == ()


def test_a_leaking_model_is_found_and_a_model_that_saw_nothing_is_not():
    """Planted signal: a network that memorises random labels tells members apart; one of one tiny step does not."""
    options = QUICK | {"trials": 2}
    leaking = fedveil.Federation(
        mlp(FEATURES, CLASSES, hidden=64), clients(), "plain", lambda p: torch.optim.Adam(p, 1e-2), batch_size=30
    )
    leaking.fit(rounds=400)
    found = fedveil.audit(leaking, TEST, **options).verdicts["plain"]["membership"]
    assert found.label is Label.LEAK
    assert found.strongest.estimate.low > 0.6
    idle = fedveil.Federation(
        mlp(FEATURES, CLASSES, hidden=64), clients(), "plain", lambda p: torch.optim.SGD(p, 1e-9), batch_size=30
    )
    idle.fit(rounds=1)
    assert fedveil.audit(idle, TEST, **options).verdicts["plain"]["membership"].strongest.estimate.low < 0.5
    assert math.isfinite(found.guess)
