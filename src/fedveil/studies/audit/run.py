"""`fedveil audit`: what a client learns under each defence, by published and by adaptive attackers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate, Scores, auc, proportion
from fedveil.data import Data
from fedveil.federation.evaluate import predict
from fedveil.progress import Progress
from fedveil.runs.config import Config, Value
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, option
from fedveil.studies.audit import page
from fedveil.studies.audit.members import MemberAttacks, average_members, join_broadcasts
from fedveil.studies.audit.page import UNDEFENDED
from fedveil.studies.audit.rebuild import rebuild
from fedveil.studies.audit.results import AuditResult, Guessing, Members, ModelFigures
from fedveil.studies.estimates import combine_broadcasts
from fedveil.studies.federations import load_or_train, measure_quality
from fedveil.studies.gradients import server
from fedveil.studies.gradients.results import Curious, ServerRound
from fedveil.studies.jobs import Done, Job, Result
from fedveil.studies.membership.attacks import ShadowAttacks
from fedveil.studies.membership.records import divide_records, shadow_jobs
from fedveil.studies.observation import observe_all
from fedveil.studies.study import JobGraph, Shown


@dataclass(frozen=True)
class AuditOptions:
    """Flags of the audit."""

    trials: int = option(20, "number of records that the attacker tries to rebuild, each in a new federation")
    broadcasts: int = option(10, "number of broadcasts to sample under a veil, each with new noise")
    network: bool = option(True, "membership by white-box networks too")
    shadows: int = option(2, "number of shadow federations for RMIA, which come in pairs; 0 for none")
    lira: bool = option(False, "run LiRA too, which needs 16 shadows or more")
    server: bool = option(True, "a curious server too, where records are images")


CURIOUS = server.ServerOptions(steps=400, restarts=1)  # half a minute on two cores, for a small network


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


def average_figures(looks: Sequence[ModelFigures]) -> ModelFigures:
    """Return the same figures of several broadcasts as one."""
    agreement = combine_broadcasts([look.agreement for look in looks])
    right, ranks = (join_broadcasts([getattr(look, name) for look in looks]) for name in ("accuracy", "ranking"))
    members = [look.membership for look in looks if look.membership]
    return ModelFigures(agreement, right, ranks, average_members(members) if members else None)


@dataclass(frozen=True)
class Audit:
    """All figures of one federation, attacker by attacker."""

    config: Config
    options: AuditOptions
    run: Path
    folder: Path  # of the shadows

    def __call__(self, progress: Progress, done: Done) -> AuditResult:
        """Attack several broadcasts, and rebuild records."""
        config, options = self.config, self.options
        federation, data = load_or_train(config, self.run, progress, done.basis)
        quality = measure_quality(federation, data)
        attacks = self.member_attacks(data) if config.data.clients > 1 else None
        count = options.broadcasts if config.defence.name == "veil" else 1
        looks: dict[str, list[ModelFigures]] = {}
        for number in range(count):
            progress(number / count, f"broadcast {number + 1}/{count}")
            seen = observe_all(federation, config.defence.name)
            for name, observed in seen.attackers.items():
                members = attacks.run(observed, number, name != PUBLISHED) if attacks else None
                found = model_figures(observed.model, federation.model, data, members)
                looks.setdefault(name, []).append(found)
        records = rebuild(progress, config, data, options.trials)
        return AuditResult(
            **asdict(quality),
            defence=config.defence.name,
            outputs=data.outputs,
            broadcasts=count,
            trials=options.trials,
            attackers={name: average_figures(own) for name, own in looks.items()},
            rebuilt=records.psnr,
            guessing=constant_answer(federation.model, data),
            inapplicable=seen.left_out,
            not_rebuilt=records.left_out,
        )

    def member_attacks(self, data: Data) -> MemberAttacks:
        """Return the attacks on the records of the other clients."""
        config, options = self.config, self.options
        records = divide_records(config, data, everyone=True)
        shadows = ShadowAttacks(config, self.folder, options.shadows, options.lira)
        return MemberAttacks(records, shadows, options.network, config.training.seed)


class AuditStudy(AttackStudy[AuditOptions, AuditResult]):
    """Published and adaptive attackers on every defence."""

    name = "audit"
    summary = "what a client learns, by published and by adaptive attackers"
    options = AuditOptions
    result = AuditResult
    needs_shared = False
    defaults = {"clients": 2, "epochs": 150}  # noqa: RUF012

    def shared(self, asked: AttackRequest[AuditOptions], folder: Path) -> list[Job[Result]]:
        """Return the shadows of all defences, and of the undefended federation; LiRA needs every record in some."""
        defences, own = (*asked.defences, "plain"), asked.options
        return shadow_jobs(
            *(asked.config, defences, own.shadows, folder), label=asked.label, everyone=True, matched=not own.lira
        )

    def attack(self, asked: AttackRequest[AuditOptions], defence: str, folder: Path) -> Audit:
        """Return the audit of one defence."""
        return Audit(asked.config_for(defence), asked.options, self.run_folder(asked, defence, folder), folder)

    def attacks(self, asked: AttackRequest[AuditOptions], folder: Path) -> dict[str, Job[AuditResult]]:
        """Return the audits of the defences, and of the undefended federation: the reference of every figure."""
        found = super().attacks(asked, folder)
        if "plain" in asked.defences:
            return found
        work = Audit(asked.config_for("plain"), asked.options, folder / "plain" / "run", folder)
        after = next(iter(found.values())).after
        return {**found, UNDEFENDED: Job(asked.job_name(UNDEFENDED), work, AuditResult, after=after)}

    def server_rounds(self, asked: AttackRequest[AuditOptions]) -> list[Job[ServerRound]]:
        """Return rounds of an undefended federation as its server sees them; a veil changes rounding alone."""
        plain = AttackRequest(asked.config_for("plain"), ("plain",), CURIOUS, label=asked.label)
        return list(server.SERVER.parts(plain, "plain").values()) if asked.options.server else []

    def graph(self, asked: AttackRequest[AuditOptions], folder: Path) -> JobGraph[Results[AuditResult]]:
        """Return the audits and the rounds of the curious server, whose results join the undefended federation."""
        audits, rounds = super().graph(asked, folder), self.server_rounds(asked)
        name = "plain" if "plain" in asked.defences else UNDEFENDED

        def collect(done: Done) -> Results[AuditResult]:
            found = audits.collect(done)
            plain = found[name]
            if rounds and isinstance(plain, AuditResult):
                found[name] = replace(plain, server=Curious([done[job] for job in rounds]))
            return found

        return JobGraph([*audits.jobs, *rounds], collect)

    def show(self, asked: AttackRequest[AuditOptions], results: Results[AuditResult]) -> Shown:
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
