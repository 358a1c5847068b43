"""`fedveil attack server`: measure what a curious server learns from single updates, sums and their differences."""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.first_layer import first_linear, record_from_agreeing_rows, record_from_gradient
from fedveil.attacks.gradients import Progress as SearchProgress
from fedveil.attacks.gradients import Search
from fedveil.attacks.leaked_gradients import Gradients, Leak, secure_sum
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.scores import Estimate
from fedveil.attacks.similarity import psnr, ssim
from fedveil.checks import check_count
from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.report import Picture, Pictures, Section, Table
from fedveil.runs.build import build_optimizer, load_data
from fedveil.runs.settings import Config
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, option, read_federations
from fedveil.studies.gradients import records as batches
from fedveil.studies.gradients import run as reconstruction
from fedveil.studies.gradients.records import NUM_OWN_RECORDS, CountedRound, read_updates
from fedveil.studies.gradients.run import parse_counts
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob
from fedveil.studies.study import JobGraph, Presentation, decode_picture, encode_image, format_estimate, read_texts
from fedveil.studies.verdicts import RECOGNITION_DB, Label

TEXTS = read_texts()["server"]
NOTE = TEXTS.note.format(recognised=RECOGNITION_DB)
RECORD_NOTE = TEXTS.notes["records"].format(recognised=RECOGNITION_DB, own=NUM_OWN_RECORDS)
SINGLE_UPDATE, SAME_MODEL, NEXT_ROUND = "single update", "same model", "next round"
ATTACKS, FLOORS = ("search", "first layer", "rows that agree"), ("mean image", "another of its class")
HEADER = ("defence", "view", "records", "recognised", *(f"{name}, dB" for name in (*ATTACKS, *FLOORS)), "SSIM")


@dataclass(frozen=True)
class NearestImage:
    """The image from an attack that is closest to any of the records in the view.

    Attributes:
        psnr, ssim: similarity of the image and the record.
        record: index of the record in the round.
        picture: the image, encoded by `encode_image`.
    """

    psnr: float
    ssim: float
    record: int
    picture: str


@dataclass(frozen=True)
class ServerView:
    """The results of a curious server's attacks on one gradient.

    Attributes:
        records: number of records that the gradient was computed from.
        attacks: closest image by attack; attacks that do not apply are omitted.
        floors: closest image by kind of guess; guesses need no gradient, and there is one per record.
    """

    records: int
    attacks: dict[str, NearestImage]
    floors: dict[str, NearestImage]

    @property
    def best(self) -> NearestImage:
        """The closest image from any attack."""
        return max(self.attacks.values(), key=lambda image: image.psnr)


@dataclass(frozen=True)
class ServerRound(Result):
    """The results of the attacks on one round of a new federation.

    Attributes:
        rows: indices of the clients' records in the training data, starting with the victim's.
        search: settings of the search.
        views: results by view.
        originals: the records, encoded by `encode_image`.
        shape: channels, height and width of an image.
    """

    rows: list[int]
    search: Search
    views: dict[str, ServerView]
    originals: list[str]
    shape: tuple[int, ...]

    def original(self, record: int) -> Picture:
        """Return the picture of a record, given its index in the round."""
        return decode_picture(self.shape, self.originals[record])


@dataclass(frozen=True)
class ServerResults(Result):
    """The results of a curious server's attacks in all rounds under one defence."""

    rounds: list[ServerRound | Failure]
    records: list[CountedRound | Failure] = field(default_factory=list)

    @property
    def failed(self) -> str:
        """The reason why a round failed; "" if none failed."""
        return next((result.failed for result in self.rounds if isinstance(result, Failure)), "")

    @property
    def complete_rounds(self) -> list[ServerRound]:
        """All rounds, or an empty list if one of them failed."""
        return [] if self.failed else [result for result in self.rounds if isinstance(result, ServerRound)]

    def view(self, name: str) -> list[ServerView]:
        """Return the results of one view in every round."""
        return [result.views[name] for result in self.complete_rounds]


def sum_view(clients: int) -> str:
    """Return the name of the view that is a sum over clients."""
    return f"sum of {clients}"


def difference_view(clients: int, models: str) -> str:
    """Return the name of the view that is a difference between two sums."""
    return f"{clients} minus {clients - 1}, {models}"


def view_rows(results: ServerResults) -> Iterator[list[str]]:
    """Yield one table row per view, without the column for the defence."""
    if results.failed:
        yield ["", "", f"failed: {results.failed}", *[""] * (len(HEADER) - 4)]
    for name in results.complete_rounds[0].views if results.complete_rounds else ():
        views = results.view(name)
        psnrs = [[view.attacks[attack].psnr for view in views if attack in view.attacks] for attack in ATTACKS]
        psnrs += [[view.floors[floor].psnr for view in views] for floor in FLOORS]
        ssim = format_estimate(median_and_range([view.best.ssim for view in views]), ".2f")
        recognised = f"{count_rounds(results, name)}/{len(views)}"
        yield [name, str(views[0].records), recognised, *map(format_estimate, map(median_and_range, psnrs)), ssim]


def median_and_range(values: Sequence[float]) -> Estimate | None:
    """Return the median with the minimum and maximum, since an attack finds a record exactly or not at all."""
    return Estimate(statistics.median(values), min(values), max(values)) if values else None


def count_rounds(results: ServerResults, name: str) -> int:
    """Return the number of rounds in which an attack on the view reveals a record."""
    return sum(view.best.psnr - view.floors[FLOORS[0]].psnr >= RECOGNITION_DB for view in results.view(name))


def verdict(results: ServerResults) -> str:
    """Return the label, the views that reveal a record, and those that do not."""
    if not results.complete_rounds:
        return f"not measured ({results.failed or 'the records are not images'})."
    counts = {name: count_rounds(results, name) for name in results.complete_rounds[0].views}
    leaks = [f"{name} ({hits} of {len(results.complete_rounds)} rounds)" for name, hits in counts.items() if hits]
    other_views = ", ".join(name for name, hits in counts.items() if not hits)
    if not leaks:
        return f"{Label.NOTHING}: no record is revealed, not even by a single update, so sums cannot be judged."
    remainder = f"; no record is revealed by {other_views}" if other_views else ""
    return f"{Label.LEAK}: a record is revealed by {', '.join(leaks)}{remainder}."


def gallery(title: str, results: ServerResults) -> list[Section]:
    """Return a grid with the victim's record of each round above the images from each view; empty without rounds."""
    rounds = results.complete_rounds
    if not rounds:
        return []
    rows: list[tuple[str, list[Picture]]] = [("victim's record", [case.original(0) for case in rounds])]
    for name in rounds[0].views:
        cases = [(case, case.views[name].best) for case in rounds]
        rows.append((name, [decode_picture(case.shape, best.picture, f"{best.psnr:.1f}") for case, best in cases]))
        if rounds[0].views[name].records > 1:
            rows.append(("its nearest record", [case.original(best.record) for case, best in cases]))
    return [Pictures(title, [f"round {index + 1}" for index in range(len(rounds))], rows, TEXTS.notes["pictures"])]


MAX_SEARCH = 16  # views with more records are not searched, because the search takes longer the more records there are
FIRST_LAYER_ATTACKS: Mapping[str, Callable[[Leak, str], Tensor]] = {
    "first layer": record_from_gradient,
    "rows that agree": record_from_agreeing_rows,
}


@dataclass(frozen=True)
class ServerOptions(reconstruction.SearchOptions):
    """Flags of the attack."""

    rounds: int = option(8, "number of rounds, each in a new federation with different records")
    sums: str = option("2,4,10,100", "numbers of clients in the sums, as a comma-separated list")
    difference: int = option(10, "number of clients in the larger of two sums that differ by one client")
    records: int = option(1, "number of records in a client's batch")
    batches: str = option("4,10,100", "batch sizes for which to count recovered records; '' for none")

    def counts(self) -> list[int]:
        """Return the number of clients in each sum."""
        for flag, value in (("--sums", self.sums), ("--batches", self.batches or "1")):
            if not parse_counts(value):
                message = f"expected distinct positive integers, got {value!r}"
                raise BadArgument(flag, message, f"pass {flag} 4,10, for example")
        for name, minimum in (("difference", 2), ("rounds", 1), ("records", 1)):
            check_count("fedveil attack server", f"--{name}", getattr(self, name), minimum)
        return parse_counts(self.sums)


def images_and_model(config: Config, run: Path | None) -> tuple[Data, nn.Module]:
    """Return the data as images, and a network for them: the latest model of a run, or a new network."""
    data = load_data(config)
    model = reconstruction.start_model(config, data, run)
    if config.data.name == "digits" and config.model.name == "mlp":  # the digits were loaded as rows of 64 numbers
        data, model = load_data(config.changed(model="lenet")), nn.Sequential(nn.Flatten(), model)
    if data.scale is None or data.train.tensor.dim() != 4:
        raise DoesNotApply(config.data.name, "the records are not images")
    if not data.classes:
        raise DoesNotApply(config.data.name, "the records have no classes")
    return data, model


def server_views(federation: Federation, counts: Sequence[int], largest: int) -> dict[str, tuple[Leak, int]]:
    """Return the server's views of client 0, each as a gradient with the number of clients in it.

    The views are the update of client 0, sums over the first clients, and two differences. A difference is the sum over
    the first `largest` clients, minus the sum over the same clients without client 0. The second sum is computed for
    the same model or for the model of the next round. In the next round, clients use the same records again, which
    helps the attacker most.
    """
    model, sizes = copy.deepcopy(federation.model), federation.shards.sizes
    updates = read_updates(federation, range(len(sizes)))
    total, other_sum = (secure_sum(updates[start:largest], sizes[start:largest]) for start in (0, 1))
    for name, gradient in total.mean().items():
        parameter = federation.model.get_parameter(name)
        parameter.grad = gradient.to(parameter)
    federation.optimizer.step()
    local_training, reach = federation.defence.local_training, 1.0
    if local_training is not None:  # all clients have the same number of records
        reach = local_training.reach(local_training.epochs * federation.shards.batches(sizes[0]))
    next_sum = secure_sum(read_updates(federation, range(1, largest)), sizes[1:largest])

    def view(gradients: Gradients, clients: int) -> tuple[Leak, int]:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        tensors = {name: gradient.to(parameters[name]) for name, gradient in gradients.items()}
        return Leak(model, tensors, federation.loss).divide_by(reach), clients

    sums = {sum_view(count): view(secure_sum(updates[:count], sizes[:count]).mean(), count) for count in counts}
    return {
        SINGLE_UPDATE: view(updates[0], 1),
        **sums,
        difference_view(largest, SAME_MODEL): view((total - other_sum).mean(), 1),
        difference_view(largest, NEXT_ROUND): view((total - next_sum).mean(), 1),
    }


def attack_view(
    leak: Leak,
    search: Search,
    data: Data,
    own_inputs: Tensor,
    size: int,
    rng: torch.Generator,
    progress: SearchProgress,
) -> dict[str, Tensor]:
    """Return the images from each attack: one per record from the search, and one from each first-layer attack."""
    result = {}
    if size <= MAX_SEARCH:
        search_result = reconstruction.search_leak(leak, search, data, own_inputs, size, rng, progress)
        result["search"] = data.pixels(search_result.inputs)
    for name, rebuild in FIRST_LAYER_ATTACKS.items():
        try:
            record = rebuild(leak, first_linear(leak.model))
        except DoesNotApply:
            continue
        if record.numel() == own_inputs[0].numel():
            result[name] = data.pixels(record.nan_to_num().reshape(1, *own_inputs.shape[1:]))
    return result


def nearest(candidates: Tensor, originals: Tensor) -> NearestImage:
    """Return the candidate image with the smallest squared distance from any original."""
    rows, columns = (images.double().flatten(1) for images in (originals, candidates))
    distances = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
    record, image = divmod(int(distances.argmin()), len(candidates))
    pair = candidates[image : image + 1].double(), originals[record : record + 1].double()
    return NearestImage(psnr(*pair)[0], ssim(*pair)[0], record, encode_image(pair[0][0]))


@dataclass(frozen=True)
class AttackRound:
    """A task that trains a new federation for one round, and runs every attack on every view of its server."""

    config: Config
    options: ServerOptions
    run: Path | None
    number: int

    def __call__(self, progress: Progress, results: JobResults) -> ServerRound:
        """Train for one round, and attack every view."""
        options = self.options
        config = self.config.changed(seed=self.config.training.seed + self.number)
        data, model = images_and_model(config, self.run)
        rows = self.rows(data)
        parts = [data.train.take(indices) for indices in torch.split(rows, options.records)]
        optimizer = build_optimizer(config.training)
        federation = reconstruction.build_small_federation(config, model, parts, optimizer, options.records)
        leaks, search = server_views(federation, options.counts(), options.difference), options.search(model)
        originals = data.pixels(data.train.tensor[rows])
        own_records = data.test.tensor[:NUM_OWN_RECORDS].to(federation.device)
        views = {}
        for index, (name, (leak, clients)) in enumerate(leaks.items()):
            size = options.records * clients
            rng = [generator(purpose, config.training.seed, size) for purpose in ("server", "guesses")]
            report = reconstruction.part_progress(progress, index, len(leaks), name)
            result = attack_view(leak, search, data, own_records, size, rng[0], report)
            if not result:
                continue
            guesses = reconstruction.guesses(data, rows[:size], rng[1], excluded=rows)
            attacks, floors = (
                {label: nearest(images.cpu(), originals[:size]) for label, images in candidates.items()}
                for candidates in (result, guesses)
            )
            views[name] = ServerView(size, attacks, floors)
        encoded_images = [encode_image(image) for image in originals]
        return ServerRound(rows.tolist(), search, views, encoded_images, tuple(originals[0].shape))

    def rows(self, data: Data) -> Tensor:
        """Return the indices of all clients' records, starting with the victim's."""
        clients, records = max(self.options.difference, *self.options.counts()), len(data.train.targets)
        required = clients * self.options.records
        if records < required:
            message = f"there are {records} training records, but {clients} clients need {required}"
            raise BadArgument(data.name, message, "use a larger --train-size, or smaller --sums")
        rng = generator("server", self.config.training.seed, self.number)
        return torch.randperm(records, generator=rng)[:required]


class ServerStudy(AttackStudy[ServerOptions, ServerResults]):
    """The attacks of a curious server, with one job per round."""

    name = "server"
    summary = "measure what a curious server learns from updates, sums (secure aggregation) and their differences"
    options = ServerOptions
    defaults = read_federations()["attack"]["server"]

    def rounds(self, request: AttackRequest[ServerOptions], defence: str) -> dict[str, StudyJob[ServerRound]]:
        """Return one job per round."""
        config, options, result = request.config_for(defence), request.options, dict[str, StudyJob[ServerRound]]()
        for index in range(options.rounds):
            label, task = (
                request.job_name("server", defence, str(index)),
                AttackRound(config, options, request.run, index),
            )
            result[str(index)] = StudyJob(label, task, ServerRound, attacked_run=request.run)
        return result

    def graph(self, request: AttackRequest[ServerOptions], folder: Path) -> JobGraph[Results[ServerResults]]:
        """Return the jobs for each defence; refuse invalid counts. Views are attacked only if records are images."""
        request.options.counts()
        try:
            images_and_model(request.config, None)
            images = True
        except DoesNotApply:
            if not request.options.batches:
                raise
            images = False
        sizes = parse_counts(request.options.batches) if request.options.batches else []
        views, records = dict[str, list[StudyJob[ServerRound]]](), dict[str, list[StudyJob[CountedRound]]]()
        for name in request.defences:
            views[name] = list(self.rounds(request, name).values()) if images else []
            config, label = request.config_for(name), request.job_name("server", name)
            records[name] = batches.record_jobs(config, request.run, sizes, request.options.rounds, label)

        def collect(results: JobResults) -> Results[ServerResults]:
            return {
                name: ServerResults([results[job] for job in views[name]], [results[job] for job in records[name]])
                for name in request.defences
            }

        jobs: list[StudyJob[Result]] = [job for jobs_of_view in views.values() for job in jobs_of_view]
        return JobGraph([*jobs, *(job for jobs_of_round in records.values() for job in jobs_of_round)], collect)

    def show(self, request: AttackRequest[ServerOptions], results: Mapping[str, ServerResults]) -> Presentation:
        """Return one row per view, a table of recovered records, and pictures."""
        rows = [[name, *row] for name, result in results.items() for row in view_rows(result)]
        counts = [[name, *row] for name, result in results.items() for row in batches.record_rows(result.records)]
        sections: list[Section] = [Table(batches.TITLE, batches.HEADER, counts, RECORD_NOTE)] if counts else []
        sections += [part for name, result in results.items() for part in gallery(f"Server's view, {name}", result)]
        verdicts = " ".join(f"{name}: {verdict(result)}" for name, result in results.items())
        return Presentation("", verdicts or "No verdict: the attack failed.", HEADER, rows, NOTE, sections)


SERVER = ServerStudy()
