"""`fedveil audit`: what a participant learns under each defence, by published and by adaptive attackers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.observed import PUBLISHED
from fedveil.attacks.scores import Estimate, Scores, auc, proportion
from fedveil.data import Data
from fedveil.federation.evaluate import predict
from fedveil.runs.config import Config, Value
from fedveil.studies.attack import Asked, AttackStudy, Results, option
from fedveil.studies.audit import page
from fedveil.studies.audit.members import MemberAttacks, averaged_members, joined
from fedveil.studies.audit.page import UNDEFENDED
from fedveil.studies.audit.rebuild import rebuild
from fedveil.studies.audit.results import Audited, Figures, Guessing, Members
from fedveil.studies.estimates import over_broadcasts
from fedveil.studies.gradients import server
from fedveil.studies.gradients.results import Curious, ServerRound
from fedveil.studies.jobs import Done, Job, Progress, Result
from fedveil.studies.membership.attacks import ByShadows
from fedveil.studies.membership.records import records_of, shadow_jobs
from fedveil.studies.study import Shown
from fedveil.studies.victim import observe_all, quality_of, trained


@dataclass(frozen=True)
class Options:
    """The audit's own flags."""

    trials: int = option(20, "records that the attacker tries to rebuild, each in a federation of its own")
    broadcasts: int = option(10, "secrets under which a veiled model is looked at; one says little about others")
    network: bool = option(True, "membership by white-box networks too")
    shadows: int = option(2, "federations that the attacker trains itself for RMIA, in pairs; 0 for none")
    lira: bool = option(False, "LiRA too; 16 shadows or more give it a chance")
    server: bool = option(True, "a curious server too, where records are images")


CURIOUS = server.Options(steps=400, restarts=1)  # half a minute on two cores, for a small network


def view_figures(view: nn.Module, model: nn.Module, data: Data, members: Members | None = None) -> Figures:
    """Agreement with the true model and accuracy, on held-out records; of one output also the AUC."""
    device = next(model.parameters()).device
    seen, true = (predict(net, data.test.tensor.to(device)).cpu() for net in (view, model))
    seen = torch.nan_to_num(seen)
    answers, labels = _decided(seen), _classes(data.test.targets)
    agreement = _share(answers == _decided(true))
    if labels is None:
        return Figures(agreement, membership=members)
    scores, ones = seen[:, 0].double().numpy(), labels.numpy() == 1
    ranks = ranking(scores[ones], scores[~ones]) if seen.shape[1] == 1 else None
    return Figures(agreement, _share(answers == labels), ranks, members)


def guessing_of(model: nn.Module, data: Data) -> Guessing:
    """Return what the best constant answer reaches on held-out records: agreement with the model, and accuracy."""
    device = next(model.parameters()).device
    answers = _decided(torch.nan_to_num(predict(model, data.test.tensor.to(device)).cpu()))
    labels = _classes(data.test.targets)
    return Guessing(_most_frequent(answers), None if labels is None else _most_frequent(labels))


def _most_frequent(answers: Tensor) -> float:
    """The share of the most frequent answer."""
    return float(torch.unique(answers, return_counts=True)[1].max()) / len(answers)


def _decided(outputs: Tensor) -> Tensor:
    """The answer that outputs stand for: the largest, or, of one output, whether it is above one half."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0.5).long()


def _share(hits: Tensor) -> Estimate:
    return proportion(int(hits.sum()), len(hits))


def _classes(targets: Tensor) -> Tensor | None:
    """Classes, or targets of 0 and 1 in one column as such."""
    if not targets.is_floating_point():
        return targets
    binary = targets.shape[1] == 1 and ((targets == 0) | (targets == 1)).all()
    return targets[:, 0].long() if binary else None


def ranking(positive: Scores, negative: Scores) -> Estimate:
    """AUC of the better direction: whoever knows a few answers knows which way round a ranking is."""
    found = auc(positive, negative)
    return found if found.value >= 0.5 else Estimate(1 - found.value, 1 - found.high, 1 - found.low)


def averaged(looks: Sequence[Figures]) -> Figures:
    """The same figures of several broadcasts as one."""
    agreement = over_broadcasts([look.agreement for look in looks])
    right, ranks = joined([look.accuracy for look in looks]), joined([look.ranking for look in looks])
    members = [look.membership for look in looks if look.membership]
    return Figures(agreement, right, ranks, averaged_members(members) if members else None)


@dataclass(frozen=True)
class Audit:
    """Every figure of one federation, attacker by attacker."""

    config: Config
    options: Options
    run: Path
    folder: Path  # of the shadows

    def __call__(self, progress: Progress, done: Done) -> Audited:
        """Look at several broadcasts, and rebuild records."""
        config, options = self.config, self.options
        federation, data = trained(config, self.run, progress, done.basis)
        quality = quality_of(federation, data)
        attacks = self.member_attacks(data) if config.data.clients > 1 else None
        count = options.broadcasts if config.defence.name == "veil" else 1
        looks: dict[str, list[Figures]] = {}
        for number in range(count):
            progress(number / count, f"broadcast {number + 1}/{count}")
            seen = observe_all(federation, config.defence.name)
            for name, observed in seen.attackers.items():
                members = attacks.look(observed, number, name != PUBLISHED) if attacks else None
                found = view_figures(observed.model, federation.model, data, members)
                looks.setdefault(name, []).append(found)
        records = rebuild(progress, config, data, options.trials)
        return Audited(
            **asdict(quality),
            defence=config.defence.name,
            outputs=data.outputs,
            broadcasts=count,
            trials=options.trials,
            attackers={name: averaged(own) for name, own in looks.items()},
            rebuilt=records.psnr,
            guessing=guessing_of(federation.model, data),
            inapplicable=seen.left_out,
            not_rebuilt=records.left_out,
        )

    def member_attacks(self, data: Data) -> MemberAttacks:
        """On the records of the other clients."""
        config, asked = self.config, self.options
        records, shadows = (
            records_of(config, data, everyone=True),
            ByShadows(config, self.folder, asked.shadows, asked.lira),
        )
        return MemberAttacks(records, shadows, asked.network, config.training.seed)


class AuditStudy(AttackStudy[Options, Audited]):
    """Published and adaptive attackers on every defence."""

    name = "audit"
    summary = "what a participant learns, by published and by adaptive attackers"
    options = Options
    result = Audited
    needs_shared = False
    defaults = {"clients": 2, "epochs": 150}  # noqa: RUF012

    def shared(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """The shadows of all defences, and of the undefended federation; LiRA wants every record inside of some."""
        defences, own = (*asked.defences, "plain"), asked.options
        return shadow_jobs(
            *(asked.config, defences, own.shadows, folder), label=asked.label, everyone=True, matched=not own.lira
        )

    def attack(self, asked: Asked[Options], defence: str, folder: Path) -> Audit:
        """See `Audit`."""
        return Audit(asked.under(defence), asked.options, self.run_of(asked, defence, folder), folder)

    def attacks(self, asked: Asked[Options], folder: Path) -> dict[str, Job[Audited]]:
        """The defences, and the undefended federation: the reference of every figure."""
        found = super().attacks(asked, folder)
        if "plain" in asked.defences:
            return found
        work = Audit(asked.under("plain"), asked.options, folder / "plain" / "run", folder)
        after = next(iter(found.values())).after
        return {**found, UNDEFENDED: Job(f"{asked.label}{UNDEFENDED}", work, Audited, after=after)}

    def server_rounds(self, asked: Asked[Options]) -> list[Job[ServerRound]]:
        """Rounds of an undefended federation, as its server sees them; under a veil it sees the same up to rounding."""
        plain = Asked(asked.under("plain"), ("plain",), CURIOUS, label=asked.label)
        return server.SERVER.rounds(plain, "plain") if asked.options.server else []

    def jobs(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """Those of every defence, and of the curious server."""
        return [*super().jobs(asked, folder), *self.server_rounds(asked)]

    def collect(self, asked: Asked[Options], folder: Path, done: Done) -> Results[Audited]:
        """By defence; what the curious server learns is with the undefended federation."""
        found, name = super().collect(asked, folder, done), "plain" if "plain" in asked.defences else UNDEFENDED
        plain, rounds = found[name], self.server_rounds(asked)
        if rounds and isinstance(plain, Audited):
            found[name] = replace(plain, server=Curious([done[job] for job in rounds]))
        return found

    def present(self, asked: Asked[Options], results: Results[Audited]) -> Shown:
        """The verdict first, then the table, pictures and how to read them."""
        first, table = page.presented(results)
        return self.framed(asked, results, *table, first, page.one_line(results))


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
