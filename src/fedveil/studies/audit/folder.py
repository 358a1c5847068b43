"""Open the folder of a run from Python, Flower or FLARE for an audit: the run itself, or a simulation of it."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.data import Data, DataPart, split
from fedveil.defences.description import adapt_to_simulation, build_from_description
from fedveil.defences.interface import AnyDefence
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.description import DESCRIPTION, RunDescription, read_description
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation
from fedveil.federation.prepare import Optimizer
from fedveil.federation.state import RECORDS, checksum_records
from fedveil.lookup import import_object
from fedveil.plain_json import parse_json
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.records.sources import UserRecords
from fedveil.runs.build import build_defence, load_data, load_factory, named_model
from fedveil.runs.settings import SECTION_OF, Config
from fedveil.scheme.broadcast import resolve_loss
from fedveil.scheme.losses import Function, Loss
from fedveil.studies.audit.training import Factory, TrainingRecipe, select_accepted
from fedveil.studies.study import read_texts

STAND_INS = 200  # number of stand-in records of each client, and of each test set
STAND_IN_NOTICE, PASSED = "STAND-IN RECORDS, NOT YOURS", "the records that were passed"


@dataclass(frozen=True, eq=False)
class GivenParts:
    """Objects that the user passes for an audit of a folder; None for those that the folder provides.

    Attributes:
        clients: the records of each client.
        test: records that were not used for training.
        data: a data set, instead of both; it is divided among the run's number of clients.
        model: the network, with any values, or a function that builds it.
        defence, loss, optimizer: as for `fedveil.Federation`.
        trust_code: whether to import classes of other packages that the folder names.
    """

    clients: Sequence[UserRecords] | None = None
    test: UserRecords | None = None
    data: Data | None = None
    model: nn.Module | Factory | None = None
    defence: str | AnyDefence | None = None
    loss: str | Loss | Function | None = None
    optimizer: Optimizer | None = None
    trust_code: bool = False


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """A trained federation, and the notes on it.

    Attributes:
        recipe: the federation, and how to train others like it.
        test: records that it was not trained on.
        description: the description of the run.
        notes: sentences about the run: whether it is simulated, and on which records.
    """

    recipe: TrainingRecipe
    test: UserRecords
    description: RunDescription
    notes: tuple[str, ...]


def open_from_description(folder: Path, given: GivenParts, progress: Progress) -> OpenedRun:
    """Return the run in a folder with its own records or, with other records, a simulation of the run.

    A simulation trains the same model with the same defence and settings for as many rounds, in one process.
    """
    if not (folder / DESCRIPTION).is_file():
        what = (
            f"there is neither config.json nor {DESCRIPTION} in this folder, so the settings of its run are not known"
        )
        fix = "use the folder of a run; for one of an earlier version, resume it in Python and audit the Federation"
        raise BadArgument(str(folder), what, fix)
    description = read_description(folder)
    tag, state = _read_state(folder)
    model, factory = build_model_from_description(folder, description, given)
    _check_values(folder, copy.deepcopy(model), state)
    clients, test, source = choose_records(description, given, model)
    records = parse_json(str(folder), state["records"])
    rates = tuple(float(record["lr"]) for record in records)
    federation = build_federation(folder, description, given, model, clients)
    notes = [] if description.version == _version() else [f"This run was written by Fedveil {description.version}."]
    if not rates:
        raise BadArgument(str(folder), "this run has no complete round", "audit it after training")
    recipe = TrainingRecipe(federation, rates, factory)
    if (
        not description.terms.remote
        and state["setting"].get(RECORDS) == checksum_records(federation.shards, tag.run) is not None
    ):
        federation.resume(folder)
        return OpenedRun(recipe, test, description, tuple(notes))
    notes.append(_describe_simulation(description, source, len(clients), len(rates)))
    parts = [DataPart(*federation.shards.records(client)) for client in range(len(clients))]
    trained = recipe.build(model, parts, federation.defence, _optimizer(folder, description, given), description.seed)
    last = len(rates)
    show = lambda record: progress(record.round / last, f"simulation, round {record.round}")  # noqa: E731
    trained.fit(rounds=last, on_round=show, verbose=False)
    return OpenedRun(replace(recipe, federation=trained), test, description, tuple(notes))


def _version() -> str:
    from importlib import metadata

    return metadata.version("fedveil")


def parts_from_flags(folder: Path, config: Config, flags: Collection[str], trust_code: bool) -> GivenParts:
    """Return the records, network and defence that a command's flags specify; refuse flags that do not apply."""
    sections = {SECTION_OF[flag]: flag for flag in flags if flag in SECTION_OF}
    for section, flag in sections.items():
        if section not in ("data", "model", "defence"):
            what = f"--{flag.replace('_', '-')} cannot be changed: the run's settings are in {DESCRIPTION}"
            raise BadArgument(str(folder), what, "leave it out")
    result = GivenParts(trust_code=trust_code)
    if "model" in sections:
        description = read_description(folder)

        def make() -> nn.Module:
            if ":" in config.model.name:
                return load_factory(config.model.name)
            return named_model(config.model, torch.Size(description.shape or ()), math.prod(description.output))

        result = replace(result, model=make)
    if "defence" in sections:
        result = replace(result, defence=build_defence(config))
    if "data" not in sections:
        return result
    if ":" in config.data.name:
        factory = import_object(config.data.name, "data", "my_package.data:load")
        given = factory() if callable(factory) else factory
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list):
            return replace(result, clients=given[0], test=given[1])
    return replace(result, data=load_data(config))


def _read_state(folder: Path) -> tuple[checkpoint.StateTag, checkpoint.Content]:
    """Return the last valid checkpoint of a run."""
    result = checkpoint.list_checkpoints(folder)
    if not result:
        raise BadArgument(str(folder), "the run has no checkpoint yet", "audit it after training")
    try:
        return checkpoint.read(result[0])
    except checkpoint.DamagedCheckpoint:
        if len(result) == 1:
            raise
        return checkpoint.read(result[1])


def build_model_from_description(
    folder: Path, description: RunDescription, given: GivenParts
) -> tuple[nn.Module, Factory | None]:
    """Return the network of a run, and the function that builds it if there is one."""
    if isinstance(given.model, nn.Module):
        return copy.deepcopy(given.model), None
    make = given.model
    if make is None:
        spec = description.factory
        if spec is None:
            what = f"the network is a {description.model.partition(':')[2]}, which cannot be built from its name"
            fix = "pass it: --model package.module:factory, or model= in Python"
            raise BadArgument(str(folder), what, fix)
        if not spec.startswith("fedveil.") and not given.trust_code:
            what = f"its network is {spec}, and importing it runs that module's code"
            raise BadArgument(str(folder), what, f"pass --model {spec} or --trust-code; in Python, trust_code=True")

        def make() -> nn.Module:
            return load_factory(spec)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        return make(), make


def _check_values(folder: Path, model: nn.Module, state: checkpoint.Content) -> None:
    """Refuse a network that does not fit the values in the run's checkpoint."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        what = f"its values belong to another network: {str(error).splitlines()[-1].strip()}"
        raise BadArgument(str(folder), what, "pass the right network with --model, or model= in Python") from error


def build_federation(
    folder: Path, description: RunDescription, given: GivenParts, model: nn.Module, clients: Sequence[UserRecords]
) -> Federation:
    """Build the federation that a description specifies, in one process and without secure aggregation."""
    where = str(folder / DESCRIPTION)
    loss = given.loss
    if loss is None:
        if description.loss_settings is None:
            what = f"the loss {description.loss} is a function of the user"
            raise BadArgument(where, what, "pass it: fedveil.audit(folder, loss=...)")
        loss = resolve_loss(where, description.loss, description.loss_settings, None)
    defence = given.defence
    if defence is None:
        defence = build_from_description(adapt_to_simulation(description.defence), where, trust_code=given.trust_code)
    limits = description.limits
    return Federation(
        model,
        clients,
        defence,
        _optimizer(folder, description, given),
        clip_norm=description.clip_norm,
        batch_size=description.terms.batch_size,
        loss=loss,
        whole_shard=description.terms.whole_shard,
        participation=description.participation,
        limits=None if limits is None else _build_limits(limits),
        seed=description.seed,
    )


def _build_limits(values: Mapping[str, object]) -> Limits:
    make: Callable[..., Limits] = Limits
    return make(**values)


def _optimizer(folder: Path, description: RunDescription, given: GivenParts) -> Optimizer:
    """Return a function that creates the optimizer of a run."""
    if given.optimizer is not None:
        return given.optimizer
    spec, settings, where = description.optimizer, description.optimizer_settings, str(folder / DESCRIPTION)
    if settings is None:
        raise BadArgument(where, "the settings of its optimizer are not known", "pass optimizer= in Python")
    if not spec.startswith("torch.optim.") and not given.trust_code:
        what = f"its optimizer is {spec}, and importing it runs that module's code"
        raise BadArgument(where, what, "use --trust-code, or pass optimizer= in Python")
    kind = import_object(spec, "an optimizer", "torch.optim:Adam")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise BadArgument(where, f"{spec} is not an optimizer", "pass optimizer= in Python")
    make: Callable[..., torch.optim.Optimizer] = kind
    values = select_accepted(make, settings)
    return lambda parameters: make(parameters, **values)


def choose_records(
    description: RunDescription, given: GivenParts, model: nn.Module
) -> tuple[list[UserRecords], UserRecords, str]:
    """Return the clients' records, the test records, and where they come from."""
    if given.clients is not None:
        if given.test is None:
            raise BadArgument("audit", "clients= is given without test=", "pass records that were not used to train")
        return list(given.clients), given.test, PASSED
    if given.data is not None:
        train = given.data.train
        rows = split(given.data, description.terms.clients or 2, seed=description.seed)
        parts: list[UserRecords] = [(part.inputs, part.targets) for part in map(train.take, rows)]
        test = given.test or (given.data.test.inputs, given.data.test.targets)
        return parts, test, f"the data set {given.data.name}, divided evenly"
    parts, test = make_stand_ins(description, model)
    return parts, test, STAND_IN_NOTICE


def make_stand_ins(description: RunDescription, model: nn.Module) -> tuple[list[UserRecords], UserRecords]:
    """Return random records of the right shapes that a network can learn: a cloud of points for each class."""
    shape, dtype, where = description.shape, description.dtype, "stand-in records"
    fix = "pass records: --data package.module:factory, or clients= and test= in Python"
    if shape is None or dtype is None:
        raise BadArgument(where, "the records of this run consist of several tensors", fix)
    if description.loss_settings is None:
        raise BadArgument(where, f"the targets that the loss {description.loss} expects are not known", fix)
    rng, clients = generator("stand-ins", description.seed), description.terms.clients or 2
    count, outputs = STAND_INS * (clients + 1), math.prod(description.output)
    classes = description.classes or 2
    labels = torch.randint(0, classes, (count,), generator=rng)
    if dtype.startswith(("int", "uint")):
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not sizes:
            raise BadArgument(where, "the largest value of its integer inputs is not known", fix)
        inputs = torch.randint(0, min(sizes), (count, *shape), generator=rng)
    else:
        centres = torch.randn(classes, *shape, generator=rng) * 3 / math.sqrt(math.prod(shape))
        inputs = torch.randn(count, *shape, generator=rng) + centres[labels]
    targets: Tensor = labels
    if description.loss == "binary_cross_entropy":
        targets = labels[:, None].expand(count, outputs).float().reshape(count, *description.output)
    elif description.classes is None:
        mixing = torch.randn(inputs[0].numel(), outputs, generator=rng) / math.sqrt(inputs[0].numel())
        targets = (inputs.float().flatten(1) @ mixing).reshape(count, *description.output)
    parts = [
        (inputs[start : start + STAND_INS], targets[start : start + STAND_INS]) for start in range(0, count, STAND_INS)
    ]
    return [*parts[:-1]], parts[-1]


def _describe_simulation(description: RunDescription, source: str, clients: int, rounds: int) -> str:
    """Return the sentences on the simulation that was audited instead of the run."""
    texts = read_texts()["audit"].notes
    values = {"clients": clients, "rounds": rounds, "records": STAND_INS, "source": source}
    secure = texts["simulated_secure"] if description.secure_aggregation else ""
    if source == STAND_IN_NOTICE:
        return f"{STAND_IN_NOTICE}: {texts['stand_ins'].format(**values, secure=secure)}"
    remark = "" if description.terms.remote else texts["other_records"]
    return texts["simulated"].format(**values, secure=secure, own=remark)
