"""`fedveil attack server`: what a curious server learns from single updates, from sums and from differences of sums."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.first_layer import first_linear, record_from_agreeing_rows, record_from_gradient
from fedveil.attacks.gradients import Search
from fedveil.attacks.leaks import Gradients, Leak
from fedveil.attacks.observed import DoesNotApply
from fedveil.attacks.similarity import psnr, ssim
from fedveil.attacks.sums import secure_sum
from fedveil.data import Data
from fedveil.defences import innermost
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.federation.local import Federation
from fedveil.federation.shards import generator
from fedveil.runs.build import build_model, build_optimizer, load_data
from fedveil.runs.config import Config
from fedveil.runs.folder import resume_federation
from fedveil.studies.attack import Asked, OnDefences, Results, option
from fedveil.studies.gradients import server_page
from fedveil.studies.gradients.results import Curious, Nearest, ServerRound, ServerView
from fedveil.studies.gradients.run import SearchOptions, Share, few_clients, guesses, is_run, searched
from fedveil.studies.gradients.server_page import NEXT_ROUND, SAME_MODEL, SINGLE, difference_of, sum_of
from fedveil.studies.jobs import Done, Job, Progress, Result
from fedveil.studies.pictures import encoded, shape_of
from fedveil.studies.study import Shown

OWN = 64  # held-out records of the server's, which show it the usual outputs of the model
SEARCHED = 16  # records in a view at most for a search, whose time grows with them
DENSE: Mapping[str, Callable[[Leak, str], Tensor]] = {
    "first layer": record_from_gradient,
    "rows that agree": record_from_agreeing_rows,
}


@dataclass(frozen=True)
class Options(SearchOptions):
    """The attack's own flags."""

    rounds: int = option(8, "rounds, each of a new federation with other records")
    sums: str = option("2,4,10,100", "clients in a sum, several numbers with commas between them")
    difference: int = option(10, "clients in a sum from which the sum over all but one of them is subtracted")
    records: int = option(1, "records in a client's batch")

    def counts(self) -> list[int]:
        """Clients in the sums."""
        try:
            counts = [int(word) for word in self.sums.split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
            raise BadArgument("--sums", f"sums over {self.sums!r} clients", "different numbers such as 2,4,10")
        if self.difference < 2:
            raise BadArgument("--difference", f"a sum over {self.difference} clients", "at least two")
        if self.rounds < 1 or self.records < 1:
            what = f"{self.rounds} rounds of {self.records} records per client"
            raise BadArgument("fedveil attack server", what, "at least one of each")
        return counts


@dataclass(frozen=True, eq=False)
class Opened:
    """A gradient that the server has, and the clients that are in it."""

    leak: Leak
    clients: range


def images_and_model(config: Config, run: Path | None) -> tuple[Data, nn.Module]:
    """The data as images, and the network that takes them: a new one, or the last one of a run."""
    data = load_data(config)
    model = build_model(config, data)
    if run and is_run(run):
        model.load_state_dict(resume_federation(config, run, data).model.state_dict())
    if config.data.name == "digits" and config.model.name == "mlp":  # loaded as rows of 64 numbers
        data, model = load_data(config.changed(model="lenet")), nn.Sequential(nn.Flatten(), model)
    if data.scale is None or data.train.tensor.dim() != 4:
        raise DoesNotApply(config.data.name, "the records are no images")
    if not data.classes:
        raise DoesNotApply(config.data.name, "the records have no classes")
    return data, model


def updates_of(federation: Federation, clients: Sequence[int]) -> list[Gradients]:
    """Each client's gradient as the server has it without secure aggregation: its own noise removed, no other added."""
    broadcast = federation.defence.broadcast(federation.model)
    found = []
    for one in innermost(federation.defence).each(federation.answers(broadcast, clients)):
        if isinstance(one, UpdateRefused):
            raise one
        found.append(dict(one.gradients))
    return found


def views_of(federation: Federation, counts: Sequence[int], largest: int) -> dict[str, Opened]:
    """What the server sees of client 0: its update, sums over the first clients, and differences of sums.

    The sums that are subtracted are over the first `largest` clients and over the same without client 0: of one model,
    or of a round and the next one. Clients use the same records in both rounds, which is best for the attacker.
    """
    model, sizes = copy.deepcopy(federation.model), federation.shards.sizes
    everyone = range(len(sizes))
    updates = updates_of(federation, everyone)
    total, others = (secure_sum(updates[first:largest], sizes[first:largest]) for first in (0, 1))
    stepped(federation, total.mean())
    later = secure_sum(updates_of(federation, everyone[1:largest]), sizes[1:largest])

    def opened(gradients: Gradients, clients: int) -> Opened:
        like = {name: parameter.detach() for name, parameter in model.named_parameters()}
        own = {name: gradient.to(like[name]) for name, gradient in gradients.items()}
        return Opened(Leak(model, own, federation.loss), everyone[:clients])

    sums = {sum_of(count): opened(secure_sum(updates[:count], sizes[:count]).mean(), count) for count in counts}
    return {
        SINGLE: opened(updates[0], 1),
        **sums,
        difference_of(largest, SAME_MODEL): opened((total - others).mean(), 1),
        difference_of(largest, NEXT_ROUND): opened((total - later).mean(), 1),
    }


def stepped(federation: Federation, gradients: Gradients) -> None:
    """The server's optimiser takes its step."""
    for name, parameter in federation.model.named_parameters():
        parameter.grad = gradients[name].to(parameter) if name in gradients else None
    federation.optimizer.step()


def attacked(
    opened: Opened, search: Search, data: Data, own: Tensor, size: int, chance: torch.Generator, progress: Share
) -> dict[str, Tensor]:
    """The pixels that each attack gives: a search as many images as there are records, the first layer one."""
    found = {}
    if size <= SEARCHED:
        found["search"] = data.pixels(searched(opened.leak, search, data, own, size, chance, progress).inputs)
    for name, rebuild in DENSE.items():
        try:
            record = rebuild(opened.leak, first_linear(opened.leak.model))
        except DoesNotApply:
            continue
        if record.numel() == own[0].numel():
            found[name] = data.pixels(record.nan_to_num().reshape(1, *own.shape[1:]))
    return found


def nearest(found: Tensor, true: Tensor) -> Nearest:
    """The image that comes nearest to a true one, by squared error."""
    rows, columns = (images.double().flatten(1) for images in (true, found))
    apart = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
    record, image = divmod(int(apart.argmin()), len(found))
    pair = found[image : image + 1].double(), true[record : record + 1].double()
    return Nearest(psnr(*pair)[0], ssim(*pair)[0], record, encoded(pair[0][0]))


@dataclass(frozen=True)
class AttackRound:
    """One round of a new federation, and every attack on every view of its server."""

    config: Config
    options: Options
    run: Path | None
    number: int

    def __call__(self, progress: Progress, done: Done) -> ServerRound:
        """Attack it."""
        options, started = self.options, time.process_time()
        config = self.config.changed(seed=self.config.training.seed + self.number)
        data, model = images_and_model(config, self.run)
        rows = self.rows(data)
        parts = [data.train.take(own) for own in torch.split(rows, options.records)]
        federation = few_clients(config, model, parts, build_optimizer(config.training), options.records)
        opened, search = views_of(federation, options.counts(), options.difference), options.search(model)
        true, own = (data.pixels(data.train.tensor[rows]), data.test.tensor[:OWN].to(federation.device))
        views = {}
        for number, (name, view) in enumerate(opened.items()):

            def share(part: float, number: int = number, name: str = name) -> None:
                progress((number + part) / len(opened), name)

            size = options.records * len(view.clients)
            chance = [generator(what, config.training.seed, size) for what in ("server", "guesses")]
            found = attacked(view, search, data, own, size, chance[0], share)
            if not found:
                continue
            below = guesses(data, rows[:size], chance[1], taken=rows)
            attacks, floors = (
                {what: nearest(images.cpu(), true[:size]) for what, images in each.items()} for each in (found, below)
            )
            views[name] = ServerView(size, attacks, floors)
        originals, seconds = [encoded(image) for image in true], time.process_time() - started
        return ServerRound(rows.tolist(), search, views, originals, shape_of(true[0]), seconds)

    def rows(self, data: Data) -> Tensor:
        """The records of all clients, the victim's first."""
        clients, records = max(self.options.difference, *self.options.counts()), len(data.train.targets)
        wanted = clients * self.options.records
        if records < wanted:
            what = f"{records} training records, {clients} clients need {wanted}"
            raise BadArgument(data.name, what, "a larger --train-size, or smaller --sums")
        chance = generator("server", self.config.training.seed, self.number)
        return torch.randperm(records, generator=chance)[:wanted]


class ServerStudy(OnDefences[Options, Curious]):
    """A curious server; every round is a job of its own."""

    name = "server"
    summary = "what a curious server learns from updates, from sums (secure aggregation) and from their differences"
    options = Options
    defaults = {"data": "digits", "clients": 100, "defence": "plain,veil"}  # noqa: RUF012

    def rounds(self, asked: Asked[Options], defence: str) -> list[Job[ServerRound]]:
        """The jobs of one defence."""
        label = f"{asked.label}server-{defence}".replace(":", ".")
        config, options = asked.under(defence), asked.options
        works = [AttackRound(config, options, asked.run, number) for number in range(options.rounds)]
        return [Job(f"{label}-{work.number}", work, ServerRound, attacked=asked.run) for work in works]

    def jobs(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """All rounds under all defences."""
        asked.options.counts()
        images_and_model(asked.config, None)
        return [job for name in asked.defences for job in self.rounds(asked, name)]

    def collect(self, asked: Asked[Options], folder: Path, done: Done) -> Results[Curious]:
        """By defence."""
        return {name: Curious([done[job] for job in self.rounds(asked, name)]) for name in asked.defences}

    def present(self, asked: Asked[Options], results: Results[Curious]) -> Shown:
        """Table and pictures."""
        first, table = server_page.presented(results)
        return self.framed(asked, results, *table, first, server_page.one_line(results))


SERVER = ServerStudy()
