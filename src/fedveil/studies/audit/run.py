"""`fedveil audit`: measure what a client learns under each defence, with published and adaptive attackers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from fedveil.attacks.first_layer import first_linear
from fedveil.attacks.generic import rebuild_record
from fedveil.attacks.observation import PUBLISHED, DoesNotApply, Observation, attempt
from fedveil.attacks.scores import Estimate, Scores, auc, average, proportion
from fedveil.attacks.similarity import psnr
from fedveil.attacks.whitebox import Recipe
from fedveil.data import Data
from fedveil.defences.registry import find
from fedveil.federation.evaluate import predict
from fedveil.progress import Progress, ignore_progress
from fedveil.records.shards import generator
from fedveil.report import Text
from fedveil.runs.settings import Config, Value
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, option, read_federations
from fedveil.studies.audit import results as page
from fedveil.studies.audit.results import AuditResult, Guessing, MembershipResults, ModelFigures, average_figures
from fedveil.studies.audit.subject import AuditSubject, configured_subject
from fedveil.studies.federations import load_or_train, measure_quality, observe
from fedveil.studies.gradients.server import SERVER, ServerOptions, ServerResults, ServerRound
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob, successes
from fedveil.studies.membership import attacks as membership
from fedveil.studies.study import JobGraph, Presentation

OWN_BATCH = 4  # batch size; also the number of the attacker's records if clients use whole shards
SHARD_SIZE = 64  # number of the victim's records if clients use whole shards
MAX_SEARCHES = 5  # maximum number of records to rebuild by a search


def quality(rebuilt: Tensor, original: Tensor, peak: float) -> float:
    """Return PSNR = 10 log10(peak^2 / MSE) in dB, at most 100; `peak` is the range of the data."""
    return psnr(torch.nan_to_num(rebuilt).reshape(1, -1), original.reshape(1, -1), peak=peak, maximum=100.0)[0]


def run_trial(subject: AuditSubject, trial_index: int, rounds: int = 2) -> tuple[Observation, Tensor]:
    """Train a new network for a few rounds on the attacker's records and one record of a victim.

    Returns the attacker's observation and the victim's records. If clients use whole shards, the victim has 64 records
    and the attacker has 4.
    """
    train, whole_shard = subject.data.train, subject.whole_shard
    order = torch.randperm(len(train.targets), generator=generator("rebuild", subject.seed, trial_index))
    own_rows, victim = (
        (order[:OWN_BATCH], order[-SHARD_SIZE:]) if whole_shard else (order[: len(order) // 2], order[-1:])
    )
    federation = subject.trial([train.take(rows) for rows in (own_rows, victim)], trial_index, OWN_BATCH, whole_shard)
    return observe(federation, rounds), train.tensor[victim]


def rebuild(progress: Progress, subject: AuditSubject, trials: int) -> tuple[dict[str, Estimate], dict[str, str]]:
    """Return the PSNR of each attacker's reconstructions, and the reason for each attacker without reconstructions.

    The PSNR of the floor, which is the mean of the attacker's records, is included. An attacker that does not apply or
    fails in any trial is left out of the result. If the network starts with a Linear layer, the layer's gradient
    reveals a record directly. Otherwise a search is needed, which takes seconds, so there are at most five trials.
    """
    records, defence_attackers = subject.data.train.tensor, subject.attackers
    low, high = float(records.min()), float(records.max())
    attackers = {PUBLISHED: rebuild_record, **defence_attackers.rebuilders}
    result: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    try:
        first_linear(subject.trial.new_model())
    except DoesNotApply:
        trials = min(trials, MAX_SEARCHES)
    for trial_index in range(trials):
        progress(trial_index / trials, f"rebuilding record {trial_index + 1}/{trials}")
        observation, victim_records = run_trial(subject, trial_index, defence_attackers.rebuild_rounds)
        guesses: dict[str, Tensor] = {page.FLOOR: observation.inputs.double().mean(0).cpu()}
        for name in [name for name in attackers if name not in reasons]:
            guess = attempt(attackers[name], observation)
            if isinstance(guess, str):
                reasons[name] = guess
            else:
                guesses[name] = guess.cpu().clamp(low, high)
        for name, guess in guesses.items():
            result.setdefault(name, []).append(max(quality(guess, record, high - low) for record in victim_records))
    psnr = {name: average(result[name]) for name in [*attackers, page.FLOOR] if name in result and name not in reasons}
    return psnr if len(psnr) > 1 else {}, reasons


@dataclass(frozen=True)
class AuditOptions:
    """Flags of the audit."""

    trials: int = option(20, "number of records that the attacker tries to reconstruct, each in a new federation")
    broadcasts: int = option(10, "number of broadcasts to sample under a veil, each with new noise")
    network: bool = option(True, "also run the white-box attack, which trains a network")
    shadows: int = option(2, "number of shadow federations for RMIA, which must be even; 0 for none")
    lira: bool = option(False, "also run LiRA, which needs at least 16 shadows")
    server: bool = option(True, "also run the attacks of a curious server if the records are images")


EPOCHS = 30  # number of training epochs of the attack network
CURIOUS_SERVER = ServerOptions(steps=400, restarts=1, batches="")  # takes 30 seconds on two cores for a small network


def predict_test(model: nn.Module, data: Data) -> Tensor:
    """Return a model's outputs for the held-out records, with non-finite values replaced."""
    return torch.nan_to_num(
        predict(model, data.test.tensor.to(next(model.parameters(), data.test.tensor).device)).cpu()
    )


def model_figures(
    model: nn.Module, true_model: nn.Module, data: Data, members: MembershipResults | None = None
) -> ModelFigures:
    """Return the agreement with the true model and the accuracy, on held-out records; with one output, also the AUC."""
    outputs, labels = predict_test(model, data), _classes(data.test.targets)
    answers = _answers(outputs)
    agreement = _fraction(answers == _answers(predict_test(true_model, data)))
    if labels is None:
        return ModelFigures(agreement, membership=members)
    scores, is_positive = outputs[:, 0].double().numpy(), labels.numpy() == 1
    ranking_auc = ranking(scores[is_positive], scores[~is_positive]) if outputs.shape[1] == 1 else None
    return ModelFigures(agreement, _fraction(answers == labels), ranking_auc, members)


def constant_answer(model: nn.Module, data: Data) -> Guessing:
    """Return the best constant answer's agreement with the model, and its accuracy, on held-out records."""
    answers, labels = _answers(predict_test(model, data)), _classes(data.test.targets)
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
    """Return the targets as classes, including a single column of 0 and 1; return None for other targets."""
    if not targets.is_floating_point():
        return targets
    is_binary = targets.shape[1] == 1 and ((targets == 0) | (targets == 1)).all()
    return targets[:, 0].long() if is_binary else None


def ranking(positive: Scores, negative: Scores) -> Estimate:
    """Return the AUC in the better direction, which an attacker would learn from a few known answers."""
    result = auc(positive, negative)
    return result if result.value >= 0.5 else Estimate(1 - result.value, 1 - result.high, 1 - result.low)


@dataclass(frozen=True)
class Audit:
    """A task that audits one federation with all attackers."""

    config: Config
    options: AuditOptions
    run: Path
    folder: Path  # contains the shadows

    def __call__(self, progress: Progress, results: JobResults) -> AuditResult:
        """Attack several broadcasts, and rebuild records."""
        federation, data = load_or_train(self.config, self.run, progress, results.basis)
        subject = configured_subject(self.config, federation, data)
        return attack_subject(subject, self.options, self.folder, progress)


def attack_subject(subject: AuditSubject, options: AuditOptions, folder: Path, progress: Progress) -> AuditResult:
    """Attack several broadcasts of a federation, and rebuild records; `folder` contains its shadows, if any."""
    federation, data, attacks = subject.federation, subject.data, None
    model_quality = measure_quality(federation, data)
    if len(subject.clients) > 1:
        shadows = membership.ShadowAttacks(subject.name, folder, options.shadows, options.lira)
        recipe = Recipe(EPOCHS, seed=subject.seed) if options.network else None
        records = membership.divide_pool(data, subject.clients, subject.seed, everyone=True)
        attacks = membership.RecordAttacks(records, shadows, recipe)
    count = options.broadcasts if subject.is_veiled else 1
    figures: dict[str, list[ModelFigures]] = {}
    for index in range(count):
        progress(index / count, f"broadcast {index + 1}/{count}")
        if attacks and index >= page.NETWORK_BROADCASTS:
            attacks = replace(attacks, recipe=None)
        views, inapplicable = subject.observe_all()
        for name, observation in views.items():
            members = infer_members(attacks, observation, name != PUBLISHED) if attacks else None
            figures.setdefault(name, []).append(model_figures(observation.model, federation.model, data, members))
    rebuilt, not_rebuilt = rebuild(progress, subject, options.trials)
    attackers = {name: average_figures(attacks) for name, attacks in figures.items()}
    quality = model_quality.metric, model_quality.train, model_quality.test, model_quality.gap
    guessing = constant_answer(federation.model, data)
    result = AuditResult(*quality, subject.name, count, options.trials, attackers, rebuilt, guessing)
    return replace(result, inapplicable=inapplicable, not_rebuilt=not_rebuilt)


def infer_members(
    attacks: membership.RecordAttacks, observation: Observation, noise_removed: bool
) -> MembershipResults:
    """Run all membership attacks on one broadcast; the result includes reasons for attacks that were not run."""
    reasons = {} if attacks.recipe else {membership.NETWORK: "not requested"}
    if attacks.records.pool.targets.dim() != 1:
        reasons["loss by class"] = "the targets have no classes"
    if not attacks.shadows.count:
        reasons[membership.SHADOWS] = "no shadows were requested"
    scores_by_attack: dict[str, membership.AttackScores] = {}
    for name, scores in attacks.run(observation, noise_removed, ignore_progress).items():
        if isinstance(scores, Failure):
            reasons[name] = scores.failed
        else:
            scores_by_attack[name] = replace(scores, roc=None)
    return MembershipResults(scores_by_attack, reasons)


class AuditStudy(AttackStudy[AuditOptions, AuditResult]):
    """The audit: published and adaptive attackers against each defence."""

    name = "audit"
    summary = "measure what a client learns, with published and adaptive attackers"
    options = AuditOptions
    result = AuditResult
    requires_shared_jobs = False
    defaults = read_federations()["attack"]["audit"]

    def shared_jobs(self, request: AttackRequest[AuditOptions], folder: Path) -> list[StudyJob[Result]]:
        """Return the jobs that train the shadows for all defences and for the undefended federation."""
        defences, options, label = (*request.defences, "plain"), request.options, request.label
        matched = not options.lira  # LiRA needs every record in at least one shadow
        return membership.shadow_jobs(
            request.config, defences, options.shadows, folder, label, everyone=True, matched=matched
        )

    def attack(self, request: AttackRequest[AuditOptions], defence: str, folder: Path) -> Audit:
        """Return the task that audits one defence."""
        return Audit(request.config_for(defence), request.options, self.run_folder(request, defence, folder), folder)

    def attacks(self, request: AttackRequest[AuditOptions], folder: Path) -> dict[str, StudyJob[AuditResult]]:
        """Return the jobs that audit all defences, and the undefended federation as a reference."""
        jobs = super().attacks(request, folder)
        if "plain" in request.defences:
            return jobs
        task = Audit(request.config_for("plain"), request.options, folder / "plain" / "run", folder)
        name, shadows = request.job_name(page.UNDEFENDED), next(iter(jobs.values())).predecessors
        return {**jobs, page.UNDEFENDED: StudyJob(name, task, AuditResult, predecessors=shadows)}

    def server_rounds(self, request: AttackRequest[AuditOptions]) -> list[StudyJob[ServerRound]]:
        """Return the jobs that attack an undefended federation as its server; a veil would affect only rounding."""
        undefended = AttackRequest(request.config_for("plain"), ("plain",), CURIOUS_SERVER, label=request.label)
        return list(SERVER.rounds(undefended, "plain").values()) if request.options.server else []

    def graph(self, request: AttackRequest[AuditOptions], folder: Path) -> JobGraph[Results[AuditResult]]:
        """Return the jobs; the results of the curious server are added to those of the undefended federation."""
        audits, rounds = super().graph(request, folder), self.server_rounds(request)
        name = "plain" if "plain" in request.defences else page.UNDEFENDED

        def collect(job_results: JobResults) -> Results[AuditResult]:
            results = audits.collect(job_results)
            undefended = results[name]
            if rounds and isinstance(undefended, AuditResult):
                results[name] = replace(undefended, server=ServerResults([job_results[job] for job in rounds]))
            return results

        return JobGraph([*audits.jobs, *rounds], collect)

    def show(self, request: AttackRequest[AuditOptions], results: Mapping[str, AuditResult]) -> Presentation:
        """Return the verdict, the table, charts, an explanation of how to read them, and the claims of the authors."""
        presentation = page.show(results)
        claims = {name: find(name).claim for name in results if name != page.UNDEFENDED}
        lines = [f"{name}: {claim}." for name, claim in claims.items() if claim]
        return replace(
            presentation,
            sections=[
                *presentation.sections,
                *([Text("Claims of the authors", lines)] if lines else []),
            ],
        )

    def summarise(self, results: Results[AuditResult], presentation: Presentation) -> Mapping[str, JsonValue]:
        """Return the conclusion, the answers and the labels."""
        return page.json_summary(presentation, successes(results))


SUITE: Mapping[str, Mapping[str, Value]] = read_federations()["suite"]
"""The federations that `fedveil audit` audits if --data is not given."""

AUDIT = AuditStudy()
