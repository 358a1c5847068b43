"""`fedveil audit`: what a client learns under each defence, by published and by adaptive attackers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.observation import PUBLISHED, Observation
from fedveil.attacks.scores import Estimate, Scores, auc, proportion
from fedveil.attacks.whitebox import Recipe
from fedveil.data import Data
from fedveil.federation.evaluate import predict
from fedveil.progress import Progress
from fedveil.runs.config import Config, Value
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, option
from fedveil.studies.audit import page
from fedveil.studies.audit.page import NETWORK_BROADCASTS, UNDEFENDED
from fedveil.studies.audit.rebuild import rebuild
from fedveil.studies.audit.results import AuditResult, Guessing, Members, ModelFigures, average_figures
from fedveil.studies.federations import load_or_train, measure_quality, observe_all
from fedveil.studies.gradients.server import SERVER, ServerOptions
from fedveil.studies.gradients.server_results import Curious, ServerRound
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob
from fedveil.studies.membership import attacks as membership
from fedveil.studies.presentation import Presentation
from fedveil.studies.study import JobGraph


@dataclass(frozen=True)
class AuditOptions:
    """Flags of the audit."""

    trials: int = option(20, "number of records that the attacker tries to rebuild, each in a new federation")
    broadcasts: int = option(10, "number of broadcasts to sample under a veil, each with new noise")
    network: bool = option(True, "membership by white-box networks too")
    shadows: int = option(2, "number of shadow federations for RMIA, which come in pairs; 0 for none")
    lira: bool = option(False, "run LiRA too, which needs 16 shadows or more")
    server: bool = option(True, "a curious server too, where records are images")


EPOCHS = 30  # of the attack network
CURIOUS = ServerOptions(steps=400, restarts=1)  # half a minute on two cores, for a small network


def model_figures(view: nn.Module, model: nn.Module, data: Data, members: Members | None = None) -> ModelFigures:
    """Return agreement with the true model and accuracy on held-out records; for one output also the AUC."""
    device = next(model.parameters()).device
    seen, true = (predict(net, data.test.tensor.to(device)).cpu() for net in (view, model))
    seen = torch.nan_to_num(seen)
    answers, labels = _answers(seen), _classes(data.test.targets)
    agreement = _fraction(answers == _answers(true))
    if labels is None:
        return ModelFigures(agreement, membership=members)
    scores, ones = seen[:, 0].double().numpy(), labels.numpy() == 1
    ranks = ranking(scores[ones], scores[~ones]) if seen.shape[1] == 1 else None
    return ModelFigures(agreement, _fraction(answers == labels), ranks, members)


def constant_answer(model: nn.Module, data: Data) -> Guessing:
    """Return the figures of the best constant answer on held-out records: agreement with the model, and accuracy."""
    device = next(model.parameters()).device
    answers = _answers(torch.nan_to_num(predict(model, data.test.tensor.to(device)).cpu()))
    labels = _classes(data.test.targets)
    return Guessing(_mode_frequency(answers), None if labels is None else _mode_frequency(labels))


def _mode_frequency(answers: Tensor) -> float:
    """Return the relative frequency of the most frequent answer."""
    return float(torch.unique(answers, return_counts=True)[1].max()) / len(answers)


def _answers(outputs: Tensor) -> Tensor:
    """Return the index of the largest output; for a single output, whether it is above one half."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0.5).long()


def _fraction(hits: Tensor) -> Estimate:
    return proportion(int(hits.sum()), len(hits))


def _classes(targets: Tensor) -> Tensor | None:
    """Return classes; targets of 0 and 1 in one column count as such."""
    if not targets.is_floating_point():
        return targets
    binary = targets.shape[1] == 1 and ((targets == 0) | (targets == 1)).all()
    return targets[:, 0].long() if binary else None


def ranking(positive: Scores, negative: Scores) -> Estimate:
    """Return the AUC in the better direction, which a few known answers show."""
    found = auc(positive, negative)
    return found if found.value >= 0.5 else Estimate(1 - found.value, 1 - found.high, 1 - found.low)


@dataclass(frozen=True)
class Audit:
    """All figures of one federation, attacker by attacker."""

    config: Config
    options: AuditOptions
    run: Path
    folder: Path  # of the shadows

    def __call__(self, progress: Progress, done: JobResults) -> AuditResult:
        """Attack several broadcasts, and rebuild records."""
        config, options = self.config, self.options
        federation, data = load_or_train(config, self.run, progress, done.basis)
        quality = measure_quality(federation, data)
        attacks = self.member_attacks(data) if config.data.clients > 1 else None
        count = options.broadcasts if config.defence.name == "veil" else 1
        figures: dict[str, list[ModelFigures]] = {}
        for number in range(count):
            progress(number / count, f"broadcast {number + 1}/{count}")
            if attacks and number >= NETWORK_BROADCASTS:
                attacks = replace(attacks, recipe=None)
            seen = observe_all(federation, config.defence.name)
            for name, observed in seen.attackers.items():
                members = infer_members(attacks, observed, name != PUBLISHED) if attacks else None
                found = model_figures(observed.model, federation.model, data, members)
                figures.setdefault(name, []).append(found)
        records = rebuild(progress, config, data, options.trials)
        return AuditResult(
            **asdict(quality),
            defence=config.defence.name,
            broadcasts=count,
            trials=options.trials,
            attackers={name: average_figures(own) for name, own in figures.items()},
            rebuilt=records.psnr,
            guessing=constant_answer(federation.model, data),
            inapplicable=seen.left_out,
            not_rebuilt=records.left_out,
        )

    def member_attacks(self, data: Data) -> membership.RecordAttacks:
        """Return the attacks on the records of the other clients."""
        config, options = self.config, self.options
        shadows = membership.ShadowAttacks(config, self.folder, options.shadows, options.lira)
        recipe = Recipe(EPOCHS, seed=config.training.seed) if options.network else None
        return membership.RecordAttacks(membership.divide_records(config, data, everyone=True), shadows, recipe)


def infer_members(attacks: membership.RecordAttacks, observed: Observation, cleaned: bool) -> Members:
    """Run all membership attacks on one broadcast; name those that lack classes, shadows or records, and why."""
    left_out = {} if attacks.recipe else {membership.NETWORK: "not asked for"}
    if attacks.records.pool.targets.dim() != 1:
        left_out |= dict.fromkeys(("loss by class", membership.SHADOWS), "the targets have no classes")
    elif not attacks.shadows.count:
        left_out[membership.SHADOWS] = "no shadows were asked for"
    scored: dict[str, membership.AttackScores] = {}
    for name, found in attacks.run(observed, cleaned, lambda fraction, what: None).items():
        if isinstance(found, Failure):
            left_out[name] = found.failed
        else:
            scored[name] = replace(found, roc=None)
    return Members(scored, left_out)


class AuditStudy(AttackStudy[AuditOptions, AuditResult]):
    """Published and adaptive attackers on every defence."""

    name = "audit"
    summary = "what a client learns, by published and by adaptive attackers"
    options = AuditOptions
    result = AuditResult
    needs_shared = False
    defaults = {"clients": 2, "epochs": 150}  # noqa: RUF012

    def shared(self, request: AttackRequest[AuditOptions], folder: Path) -> list[StudyJob[Result]]:
        """Return the shadows of all defences, and of the undefended federation; LiRA needs every record in some."""
        defences, own, label = (*request.defences, "plain"), request.options, request.label
        return membership.shadow_jobs(
            request.config, defences, own.shadows, folder, label, everyone=True, matched=not own.lira
        )

    def attack(self, request: AttackRequest[AuditOptions], defence: str, folder: Path) -> Audit:
        """Return the audit of one defence."""
        return Audit(request.config_for(defence), request.options, self.run_folder(request, defence, folder), folder)

    def attacks(self, request: AttackRequest[AuditOptions], folder: Path) -> dict[str, StudyJob[AuditResult]]:
        """Return the audits of the defences, and of the undefended federation: the reference of every figure."""
        found = super().attacks(request, folder)
        if "plain" in request.defences:
            return found
        work = Audit(request.config_for("plain"), request.options, folder / "plain" / "run", folder)
        after = next(iter(found.values())).after
        return {**found, UNDEFENDED: StudyJob(request.job_name(UNDEFENDED), work, AuditResult, after=after)}

    def server_rounds(self, request: AttackRequest[AuditOptions]) -> list[StudyJob[ServerRound]]:
        """Return rounds of an undefended federation as its server sees them; a veil changes rounding alone."""
        plain = AttackRequest(request.config_for("plain"), ("plain",), CURIOUS, label=request.label)
        return list(SERVER.rounds(plain, "plain").values()) if request.options.server else []

    def graph(self, request: AttackRequest[AuditOptions], folder: Path) -> JobGraph[Results[AuditResult]]:
        """Return the audits and the rounds of the curious server, whose results join the undefended federation."""
        audits, rounds = super().graph(request, folder), self.server_rounds(request)
        name = "plain" if "plain" in request.defences else UNDEFENDED

        def collect(done: JobResults) -> Results[AuditResult]:
            found = audits.collect(done)
            plain = found[name]
            if rounds and isinstance(plain, AuditResult):
                found[name] = replace(plain, server=Curious([done[job] for job in rounds]))
            return found

        return JobGraph([*audits.jobs, *rounds], collect)

    def show(self, request: AttackRequest[AuditOptions], results: Results[AuditResult]) -> Presentation:
        """Return the verdict, the table, charts and how to read them."""
        return page.show(results)


_DIGITS: Mapping[str, Value] = {"data": "digits", "train_size": 500, "epochs": 150, "groups": 10}
_BANK: Mapping[str, Value] = {"data": "bank", "clients": 3, "epochs": 8}
_LOSS: Mapping[str, Value] = {"loss": "squared_error"}  # the paper's
SUITE: Mapping[str, Mapping[str, Value]] = {
    "digits, 2 clients": {**_DIGITS, **_LOSS, "clients": 2},
    "digits, 5 clients": {**_DIGITS, **_LOSS, "clients": 5},
    "bank, two classes": {**_BANK, **_LOSS, "task": "classification", "groups": 2},
    "bank, one output": {**_BANK, **_LOSS},
}
"""The federations that `fedveil audit` measures without --data."""

AUDIT = AuditStudy()
