"""`fedveil attack server`: what a curious server learns from single updates, from sums and from differences of sums."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedveil.attacks.first_layer import first_linear, record_from_agreeing_rows, record_from_gradient
from fedveil.attacks.gradients import Progress as SearchProgress
from fedveil.attacks.gradients import Search
from fedveil.attacks.leaked_gradients import Gradients, Leak, secure_sum
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.similarity import psnr, ssim
from fedveil.data import Data
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import build_optimizer, load_data
from fedveil.runs.config import Config
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, join_parts, option
from fedveil.studies.gradients import run as reconstruction
from fedveil.studies.gradients import server_results as page
from fedveil.studies.gradients.server_results import Curious, Nearest, ServerRound, ServerView
from fedveil.studies.jobs import JobResults, StudyJob
from fedveil.studies.presentation import Presentation, encode_image
from fedveil.studies.study import JobGraph

OWN = 64  # held-out records that show the server typical outputs of the model
MAX_SEARCH = 16  # maximum of records in a view for a search, whose time grows with them
DENSE: Mapping[str, Callable[[Leak, str], Tensor]] = {
    "first layer": record_from_gradient,
    "rows that agree": record_from_agreeing_rows,
}


@dataclass(frozen=True)
class ServerOptions(reconstruction.SearchOptions):
    """Flags of the attack."""

    rounds: int = option(8, "rounds, each of a new federation with other records")
    sums: str = option("2,4,10,100", "clients in a sum, a comma-separated list of numbers")
    difference: int = option(10, "clients in a sum from which the sum over all but one of them is subtracted")
    records: int = option(1, "records in a client's batch")

    def counts(self) -> list[int]:
        """Return the numbers of clients in the sums."""
        counts = reconstruction.parse_counts(self.sums)
        if not counts:
            raise BadArgument("--sums", f"sums over {self.sums!r} clients", "use different numbers such as 2,4,10")
        if self.difference < 2:
            raise BadArgument("--difference", f"a sum over {self.difference} clients", "use at least two")
        if self.rounds < 1 or self.records < 1:
            what = f"{self.rounds} rounds of {self.records} records per client"
            raise BadArgument("fedveil attack server", what, "use at least one of each")
        return counts


class GradientView(NamedTuple):
    """A gradient that the server has, and the number of clients in it."""

    leak: Leak
    clients: int


def images_and_model(config: Config, run: Path | None) -> tuple[Data, nn.Module]:
    """Return the data as images, and the network that takes them: a new one, or the last one of a run."""
    data = load_data(config)
    model = reconstruction.start_model(config, data, run)
    if config.data.name == "digits" and config.model.name == "mlp":  # loaded as rows of 64 numbers
        data, model = load_data(config.changed(model="lenet")), nn.Sequential(nn.Flatten(), model)
    if data.scale is None or data.train.tensor.dim() != 4:
        raise DoesNotApply(config.data.name, "the records are not images")
    if not data.classes:
        raise DoesNotApply(config.data.name, "the records have no classes")
    return data, model


def read_updates(federation: Federation, clients: Sequence[int]) -> list[Gradients]:
    """Return each client's gradient as the server has it without secure aggregation, its noise removed."""
    own_round = federation.defence_server.start_round(federation.model).base
    found = []
    for one in own_round.recover_each(federation.clients.updates(own_round.broadcast, clients, federation.round)):
        if isinstance(one, UpdateRefused):
            raise one
        found.append(dict(one.gradients))
    return found


def server_views(federation: Federation, counts: Sequence[int], largest: int) -> dict[str, GradientView]:
    """Return what the server sees of client 0: its update, sums over the first clients, and differences of sums.

    The sums that are subtracted are over the first `largest` clients and over the same without client 0: of one model,
    or of a round and the next one. Clients use the same records in both rounds, which is best for the attacker.
    """
    model, sizes = copy.deepcopy(federation.model), federation.shards.sizes
    everyone = range(len(sizes))
    updates = read_updates(federation, everyone)
    total, others = (secure_sum(updates[first:largest], sizes[first:largest]) for first in (0, 1))
    for name, gradient in total.mean().items():
        parameter = federation.model.get_parameter(name)
        parameter.grad = gradient.to(parameter)
    federation.optimizer.step()
    later = secure_sum(read_updates(federation, everyone[1:largest]), sizes[1:largest])

    def view(gradients: Gradients, clients: int) -> GradientView:
        like = {name: parameter.detach() for name, parameter in model.named_parameters()}
        own = {name: gradient.to(like[name]) for name, gradient in gradients.items()}
        return GradientView(Leak(model, own, federation.loss), clients)

    sums = {page.sum_view(count): view(secure_sum(updates[:count], sizes[:count]).mean(), count) for count in counts}
    return {
        page.SINGLE: view(updates[0], 1),
        **sums,
        page.difference_view(largest, page.SAME_MODEL): view((total - others).mean(), 1),
        page.difference_view(largest, page.NEXT_ROUND): view((total - later).mean(), 1),
    }


def attack_view(
    leak: Leak, search: Search, data: Data, own: Tensor, size: int, chance: torch.Generator, progress: SearchProgress
) -> dict[str, Tensor]:
    """Return the images of each attack: one per record by a search, one by the first layer."""
    found = {}
    if size <= MAX_SEARCH:
        made = reconstruction.search_leak(leak, search, data, own, size, chance, progress)
        found["search"] = data.pixels(made.inputs)
    for name, rebuild in DENSE.items():
        try:
            record = rebuild(leak, first_linear(leak.model))
        except DoesNotApply:
            continue
        if record.numel() == own[0].numel():
            found[name] = data.pixels(record.nan_to_num().reshape(1, *own.shape[1:]))
    return found


def nearest(found: Tensor, true: Tensor) -> Nearest:
    """Return the image that comes nearest to a true one, by squared error."""
    rows, columns = (images.double().flatten(1) for images in (true, found))
    apart = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
    record, image = divmod(int(apart.argmin()), len(found))
    pair = found[image : image + 1].double(), true[record : record + 1].double()
    return Nearest(psnr(*pair)[0], ssim(*pair)[0], record, encode_image(pair[0][0]))


@dataclass(frozen=True)
class AttackRound:
    """One round of a new federation, and every attack on every view of its server."""

    config: Config
    options: ServerOptions
    run: Path | None
    number: int

    def __call__(self, progress: Progress, done: JobResults) -> ServerRound:
        """Attack it."""
        options = self.options
        config = self.config.changed(seed=self.config.training.seed + self.number)
        data, model = images_and_model(config, self.run)
        rows = self.rows(data)
        parts = [data.train.take(own) for own in torch.split(rows, options.records)]
        federation = reconstruction.few_clients(config, model, parts, build_optimizer(config.training), options.records)
        seen, search = server_views(federation, options.counts(), options.difference), options.search(model)
        true, own = (data.pixels(data.train.tensor[rows]), data.test.tensor[:OWN].to(federation.device))
        views = {}
        for number, (name, view) in enumerate(seen.items()):
            size = options.records * view.clients
            chance = [generator(what, config.training.seed, size) for what in ("server", "guesses")]
            report = reconstruction.part_progress(progress, number, len(seen), name)
            found = attack_view(view.leak, search, data, own, size, chance[0], report)
            if not found:
                continue
            below = reconstruction.guesses(data, rows[:size], chance[1], taken=rows)
            attacks, floors = (
                {what: nearest(images.cpu(), true[:size]) for what, images in each.items()} for each in (found, below)
            )
            views[name] = ServerView(size, attacks, floors)
        originals = [encode_image(image) for image in true]
        return ServerRound(rows.tolist(), search, views, originals, tuple(true[0].shape))

    def rows(self, data: Data) -> Tensor:
        """Return the records of all clients, the victim's first."""
        clients, records = max(self.options.difference, *self.options.counts()), len(data.train.targets)
        wanted = clients * self.options.records
        if records < wanted:
            what = f"{records} training records, {clients} clients need {wanted}"
            raise BadArgument(data.name, what, "use a larger --train-size, or smaller --sums")
        chance = generator("server", self.config.training.seed, self.number)
        return torch.randperm(records, generator=chance)[:wanted]


class ServerStudy(AttackStudy[ServerOptions, Curious]):
    """A curious server; one job per round."""

    name = "server"
    summary = "what a curious server learns from updates, from sums (secure aggregation) and from their differences"
    options = ServerOptions
    defaults = {"data": "digits", "clients": 100, "defence": "plain,veil"}  # noqa: RUF012

    def rounds(self, request: AttackRequest[ServerOptions], defence: str) -> dict[str, StudyJob[ServerRound]]:
        """Return one job per round."""
        config, options, found = request.config_for(defence), request.options, dict[str, StudyJob[ServerRound]]()
        for number in range(options.rounds):
            work, name = AttackRound(config, options, request.run, number), str(number)
            found[name] = StudyJob(request.job_name("server", defence, name), work, ServerRound, attacked=request.run)
        return found

    def graph(self, request: AttackRequest[ServerOptions], folder: Path) -> JobGraph[Results[Curious]]:
        """Return one job per defence and round; refuse wrong numbers, and records that are not images."""
        request.options.counts()
        images_and_model(request.config, None)
        jobs = {defence: self.rounds(request, defence) for defence in request.defences}
        return join_parts(jobs, lambda parts: Curious(list(parts.values())))

    def show(self, request: AttackRequest[ServerOptions], results: Results[Curious]) -> Presentation:
        """Return one row per view, and pictures."""
        return page.show(results)


SERVER = ServerStudy()
