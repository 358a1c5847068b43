"""`fedveil.audit`: audit a federation in memory, or the folder of any run, and return the result."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue
from pydantic_core import to_jsonable_python
from torch import nn

from fedveil.data import Data
from fedveil.defences.interface import AnyDefence
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.federation.prepare import Optimizer
from fedveil.federation.results import is_repeatable
from fedveil.files import write_atomically
from fedveil.plain_json import to_json
from fedveil.progress import Progress, ignore_progress
from fedveil.records.sources import UserRecords
from fedveil.report import Answers, Facts
from fedveil.runs.folder import read_config
from fedveil.scheme.losses import Function, Loss
from fedveil.studies.attack import AttackRequest, Results, complete_presentation
from fedveil.studies.audit import results as page
from fedveil.studies.audit.decision import warn_of_stand_ins
from fedveil.studies.audit.folder import STAND_IN_NOTICE, AuditOverrides, open_from_description
from fedveil.studies.audit.memory import FUNCTION, MemoryAudit, collect_data
from fedveil.studies.audit.results import AuditResult
from fedveil.studies.audit.run import AUDIT, AuditOptions
from fedveil.studies.audit.training import Factory, TrainingRecipe
from fedveil.studies.federations import describe_run
from fedveil.studies.jobs import Failure, successes
from fedveil.studies.study import SCHEMA, Presentation, gather
from fedveil.studies.verdicts import Verdict

if TYPE_CHECKING:
    from pandas import DataFrame

Folder = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class AuditReport:
    """The result of an audit.

    Attributes:
        results: the results by defence; "undefended" is the reference without a defence. An audit that failed is a
            `Failure` with the reason.
        presentation: the content of the page.
        notes: sentences about what was audited, for example that a run was simulated on stand-in records.
        command: the command or function call that produced the report.
    """

    results: Mapping[str, AuditResult | Failure]
    presentation: Presentation
    notes: tuple[str, ...]
    command: str

    def __repr__(self) -> str:
        presentation = self.presentation
        labels = [
            f"  {name}, {verdict.measure.subject}: {verdict}"
            for name, by_subject in self.verdicts.items()
            for verdict in by_subject.values()
        ]
        failures = [
            f"  {name}: failed: {result.failed}" for name, result in self.results.items() if isinstance(result, Failure)
        ]
        return "\n".join([presentation.title, presentation.plain_verdict or presentation.verdict, *labels, *failures])

    @property
    def verdicts(self) -> dict[str, dict[str, Verdict]]:
        """The verdicts by defence and subject: "the model", "membership" and "single records"."""
        return page.list_verdicts(successes(self.results))

    @property
    def answers(self) -> Mapping[str, Sequence[str]]:
        """The answers for decision makers, by question; empty if the audit failed."""
        return page.find_answers(self.presentation)

    def to_frame(self) -> "DataFrame":
        """Return a pandas DataFrame with one row per defence, attacker and figure."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise BadArgument("to_frame", "pandas is not installed", "run pip install pandas") from error
        rows = [
            {"defence": name, "attacker": attacker, "figure": figure, **asdict(estimate)}
            for name, result in successes(self.results).items()
            for attacker in result.names
            for figure, estimate in result.figures(attacker).items()
            if estimate
        ]
        return DataFrame(rows, columns=["defence", "attacker", "figure", "value", "low", "high"])

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the content of results.json (docs/audit.md)."""
        result: dict[str, JsonValue] = to_jsonable_python(
            {"schema": SCHEMA, "command": self.command, "notes": self.notes, "results": self.results}
            | page.json_summary(self.presentation, successes(self.results))
        )
        return result

    def page(self, path: Folder) -> Path:
        """Write the page (report.html if `path` is a folder), and results.json next to it; return the page's path."""
        from fedveil.report import write

        path = Path(path)
        file = path if path.suffix in (".html", ".htm") else path / "report.html"
        write_atomically(file.parent / "results.json", to_json(self.to_dict(), indent=1) + "\n")
        return write(self.presentation.page(self.command), file)


def audit(
    run: Federation | Folder,
    test: UserRecords | None = None,
    *,
    clients: Sequence[UserRecords] | None = None,
    data: Data | None = None,
    model: nn.Module | Factory | None = None,
    defence: str | AnyDefence | None = None,
    loss: str | Loss | Function | None = None,
    optimizer: Optimizer | None = None,
    trust_code: bool = False,
    trials: int = 20,
    broadcasts: int = 10,
    network: bool = True,
    shadows: int = 2,
    progress: Progress = ignore_progress,
) -> AuditReport:
    """Measure what attackers learn from a trained federation, which is not changed.

    Args:
        run: a trained `Federation`, or the folder of a run of `fedveil train`, `Federation.fit(folder=)`, Flower or
            FLARE. A run is simulated in one process if its records are not passed or if it was trained on other
            records; the report says so.
        test: records that were not used for training; required for a `Federation`.
        clients: for a folder: the records of each client; by default, random stand-ins of the right shapes.
        data: for a folder: a data set, which is divided evenly among the clients of the run.
        model: for a folder: the network, or a function that builds it. For a `Federation`: a function that builds the
            network with new initial values, if its modules have no `reset_parameters`.
        defence: for a folder: the defence, if its description does not contain all arguments.
        loss: for a folder: the loss, if it is a function.
        optimizer: for a folder: the optimizer, if its description does not contain its settings.
        trust_code: whether to import code that the folder names.
        trials: number of records that the attacker tries to rebuild.
        broadcasts: number of broadcasts to sample under a veil.
        network: whether to infer membership with white-box networks as well.
        shadows: number of shadow federations to train for RMIA, which must be even; 0 for none.
        progress: called with the completed fraction and the current step.

    Returns:
        The report: `report.verdicts`, `report.to_frame()`, and `report.page(path)`, which writes a page.
    """
    options = AuditOptions(trials, broadcasts, network, shadows)
    overrides = AuditOverrides(clients, test, data, model, defence, loss, optimizer, trust_code)
    if isinstance(run, Federation):
        return audit_federation(run, overrides, options, progress)
    folder = Path(run)
    if is_repeatable(folder):
        return audit_from_config(folder, overrides, options, progress)
    return audit_from_description(folder, overrides, options, progress, f"fedveil audit {folder}")


def audit_federation(
    run: Federation, overrides: AuditOverrides, options: AuditOptions, progress: Progress
) -> AuditReport:
    """Audit a federation in memory."""
    for name in ("clients", "data", "defence", "loss", "optimizer"):
        if getattr(overrides, name) is not None:
            raise BadArgument(
                FUNCTION, f"{name}= applies only to a folder, but a Federation was passed", f"leave out {name}="
            )
    if overrides.test is None:
        message = "there are no test records to compare the clients' records with"
        raise BadArgument(
            FUNCTION, message, "pass records that were not used for training: fedveil.audit(federation, test)"
        )
    if isinstance(overrides.model, nn.Module):
        raise BadArgument(
            FUNCTION,
            "model= must be a function, got a model",
            "pass a function that builds the network, or leave out model=",
        )
    rates = tuple(record.lr for record in run.history.records)
    rates = rates or (float(run.optimizer.param_groups[0]["lr"]),) * run.round
    if not rates:
        raise BadArgument(FUNCTION, "the federation has not been trained", "call fit first")
    recipe = TrainingRecipe(run, rates, overrides.model)
    subject = MemoryAudit(recipe, collect_data(run, overrides.test, "records"), options)
    return run_audit(subject, (), "fedveil.audit(federation, test)", progress)


def audit_from_description(
    folder: Path, overrides: AuditOverrides, options: AuditOptions, progress: Progress, command: str
) -> AuditReport:
    """Audit the run of a server in Python, Flower or FLARE, or a simulation of the run."""
    opened_run = open_from_description(folder, overrides, progress)
    data = collect_data(opened_run.recipe.federation, opened_run.test, "records")
    return run_audit(MemoryAudit(opened_run.recipe, data, options), opened_run.notes, command, progress)


def audit_from_config(
    folder: Path, overrides: AuditOverrides, options: AuditOptions, progress: Progress
) -> AuditReport:
    """Audit the run of a configuration as `fedveil audit` does, in this process; results are stored in its folder."""
    for name in ("clients", "test", "data", "model", "defence", "loss", "optimizer"):
        if getattr(overrides, name) is not None:
            message = f"{name}= is given, but config.json already specifies it"
            raise BadArgument(str(folder), message, f"leave out {name}=")
    from fedveil.runs.build import choose_loss

    config = choose_loss(read_config(folder, trust_code=overrides.trust_code))
    notes = tuple(describe_run(config, folder))
    request = AttackRequest(config, (config.defence.name,), options, folder, notes=notes)
    result: Results[AuditResult] = gather(
        AUDIT,
        request,
        folder / "audit",
        workers=1,
        show=lambda name, fraction, step: progress(fraction, f"{name}: {step}"),
    )
    return AuditReport(result, AUDIT.present(request, result), notes, f"fedveil audit {folder}")


def run_audit(subject: MemoryAudit, notes: tuple[str, ...], command: str, progress: Progress) -> AuditReport:
    """Run an audit in memory, and present its results."""
    result, audit_notes = subject.run(progress)
    notes = (*notes, *audit_notes)
    federation = subject.recipe.federation
    values = {
        "defence": federation.defence.name,
        "model": type(federation.model).__name__,
        "parameters": f"{sum(parameter.numel() for parameter in federation.model.parameters()):,}",
        "loss": federation.loss.name,
        "optimizer": type(federation.optimizer).__name__,
        "clients": str(len(federation.shards.sizes)),
        "records": f"{sum(federation.shards.sizes):,}",
        "records held out": f"{len(subject.data.test.targets):,}",
        "rounds": str(len(subject.recipe.rates)),
        **{name: str(value) for name, value in asdict(subject.options).items() if name not in ("lira", "server")},
    }
    presentation = complete_presentation(page.show(successes(result)), result, notes, Facts("Configuration", values))
    if any(note.startswith(STAND_IN_NOTICE) for note in notes):
        top_sections = [
            warn_of_stand_ins(section) if isinstance(section, Answers) else section
            for section in presentation.top_sections
        ]
        presentation = replace(presentation, top_sections=top_sections, plain_verdict=" ".join(notes))
    title = (
        f"Audit of {type(federation.model).__name__}, {federation.defence.name}, {len(federation.shards.sizes)} clients"
    )
    return AuditReport(result, replace(presentation, title=title), notes, command)
