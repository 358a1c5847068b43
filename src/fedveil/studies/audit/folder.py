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
from fedveil.studies.audit.training import Factory, TrainingRecipe, filter_arguments
from fedveil.studies.study import read_texts

NUM_STAND_INS = 200  # number of stand-in records per client, and in the test set
STAND_IN_NOTICE, PASSED_RECORDS = "STAND-IN RECORDS, NOT YOURS", "the records that were passed"


@dataclass(frozen=True, eq=False)
class AuditOverrides:
    """Objects that a user passes for the audit of a folder; None for the objects that the folder provides.

    Attributes:
        clients: the records of each client.
        test: records that were not used for training.
        data: a data set to divide among the run's clients, instead of `clients` and `test`.
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
    """A trained federation, and notes on it.

    Attributes:
        recipe: the federation, with the settings for training others like it.
        test: records that the federation was not trained on.
        description: the description of the run.
        notes: sentences about the run: whether it is simulated, and on which records.
    """

    recipe: TrainingRecipe
    test: UserRecords
    description: RunDescription
    notes: tuple[str, ...]


def open_from_description(folder: Path, overrides: AuditOverrides, progress: Progress) -> OpenedRun:
    """Return the run in a folder if its records are available; otherwise return a simulation on other records.

    A simulation trains the same model with the same defence and settings, for the same number of rounds, in one
    process.
    """
    if not (folder / DESCRIPTION).is_file():
        message = f"the folder contains neither config.json nor {DESCRIPTION}, so the run's settings are unknown"
        fix = (
            "use the folder of a run; if an earlier version wrote it, resume the run in Python and audit the Federation"
        )
        raise BadArgument(str(folder), message, fix)
    description = read_description(folder)
    state_tag, state = _read_state(folder)
    model, factory = build_model_from_description(folder, description, overrides)
    _check_values(folder, copy.deepcopy(model), state)
    clients, test, source = choose_records(description, overrides, model)
    records = parse_json(str(folder), state["records"])
    rates = tuple(float(record["lr"]) for record in records)
    federation = build_federation(folder, description, overrides, model, clients)
    notes = [] if description.version == _version() else [f"This run was written by Fedveil {description.version}."]
    if not rates:
        raise BadArgument(str(folder), "the run has no complete round", "audit it after training")
    recipe = TrainingRecipe(federation, rates, factory)
    if (
        not description.terms.remote
        and state["setting"].get(RECORDS) == checksum_records(federation.shards, state_tag.run) is not None
    ):
        federation.resume(folder)
        return OpenedRun(recipe, test, description, tuple(notes))
    notes.append(_describe_simulation(description, source, len(clients), len(rates)))
    parts = [DataPart(*federation.shards.records(client)) for client in range(len(clients))]
    simulated_federation = recipe.build(
        model, parts, federation.defence, _optimizer(folder, description, overrides), description.seed
    )
    rounds = len(rates)
    report = lambda record: progress(record.round / rounds, f"simulation, round {record.round}")  # noqa: E731
    simulated_federation.fit(rounds=rounds, on_round=report, verbose=False)
    return OpenedRun(replace(recipe, federation=simulated_federation), test, description, tuple(notes))


def _version() -> str:
    from importlib import metadata

    return metadata.version("fedveil")


def parts_from_flags(folder: Path, config: Config, flags: Collection[str], trust_code: bool) -> AuditOverrides:
    """Return the records, network and defence that a command's flags specify; refuse flags that do not apply."""
    sections = {SECTION_OF[flag]: flag for flag in flags if flag in SECTION_OF}
    for section, flag in sections.items():
        if section not in ("data", "model", "defence"):
            message = f"--{flag.replace('_', '-')} cannot be changed: the run's settings are in {DESCRIPTION}"
            raise BadArgument(str(folder), message, "leave it out")
    result = AuditOverrides(trust_code=trust_code)
    if "model" in sections:
        description = read_description(folder)

        def build_model() -> nn.Module:
            if ":" in config.model.name:
                return load_factory(config.model.name)
            return named_model(config.model, torch.Size(description.shape or ()), math.prod(description.output))

        result = replace(result, model=build_model)
    if "defence" in sections:
        result = replace(result, defence=build_defence(config))
    if "data" not in sections:
        return result
    if ":" in config.data.name:
        factory = import_object(config.data.name, "data", "my_package.data:load")
        records = factory() if callable(factory) else factory
        if isinstance(records, tuple) and len(records) == 2 and isinstance(records[0], list):
            return replace(result, clients=records[0], test=records[1])
    return replace(result, data=load_data(config))


def _read_state(folder: Path) -> tuple[checkpoint.StateTag, checkpoint.Content]:
    """Return the last valid checkpoint of a run."""
    checkpoints = checkpoint.list_checkpoints(folder)
    if not checkpoints:
        raise BadArgument(str(folder), "the run has no checkpoint yet", "audit it after training")
    try:
        return checkpoint.read(checkpoints[0])
    except checkpoint.DamagedCheckpoint:
        if len(checkpoints) == 1:
            raise
        return checkpoint.read(checkpoints[1])


def build_model_from_description(
    folder: Path, description: RunDescription, overrides: AuditOverrides
) -> tuple[nn.Module, Factory | None]:
    """Return the network of a run, and the function that builds it, if any."""
    if isinstance(overrides.model, nn.Module):
        return copy.deepcopy(overrides.model), None
    factory = overrides.model
    if factory is None:
        spec = description.factory
        if spec is None:
            message = f"the network, {description.model.partition(':')[2]}, cannot be built from its name"
            fix = "pass --model package.module:factory, or model= in Python"
            raise BadArgument(str(folder), message, fix)
        if not spec.startswith("fedveil.") and not overrides.trust_code:
            message = f"the network is {spec}; importing it would run that module's code"
            raise BadArgument(
                str(folder), message, f"pass --model {spec} or --trust-code, or trust_code=True in Python"
            )

        def factory() -> nn.Module:
            return load_factory(spec)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        return factory(), factory


def _check_values(folder: Path, model: nn.Module, state: checkpoint.Content) -> None:
    """Refuse a network that does not fit the values in the run's checkpoint."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        message = f"the checkpoint belongs to another network: {str(error).splitlines()[-1].strip()}"
        raise BadArgument(
            str(folder), message, "pass the network that this run used: --model, or model= in Python"
        ) from error


def build_federation(
    folder: Path,
    description: RunDescription,
    overrides: AuditOverrides,
    model: nn.Module,
    clients: Sequence[UserRecords],
) -> Federation:
    """Build the federation that a description specifies, in one process and without secure aggregation."""
    location = str(folder / DESCRIPTION)
    loss = overrides.loss
    if loss is None:
        if description.loss_settings is None:
            message = f"the loss {description.loss} is a user-defined function"
            raise BadArgument(location, message, "pass the function: fedveil.audit(folder, loss=...)")
        loss = resolve_loss(location, description.loss, description.loss_settings, None)
    defence = overrides.defence
    if defence is None:
        defence = build_from_description(
            adapt_to_simulation(description.defence), location, trust_code=overrides.trust_code
        )
    limits = description.limits
    return Federation(
        model,
        clients,
        defence,
        _optimizer(folder, description, overrides),
        clip_norm=description.clip_norm,
        batch_size=description.terms.batch_size,
        loss=loss,
        whole_shard=description.terms.whole_shard,
        participation=description.participation,
        limits=None if limits is None else _build_limits(limits),
        seed=description.seed,
    )


def _build_limits(values: Mapping[str, object]) -> Limits:
    create: Callable[..., Limits] = Limits
    return create(**values)


def _optimizer(folder: Path, description: RunDescription, overrides: AuditOverrides) -> Optimizer:
    """Return a function that creates the optimizer of a run."""
    if overrides.optimizer is not None:
        return overrides.optimizer
    spec, settings, location = description.optimizer, description.optimizer_settings, str(folder / DESCRIPTION)
    if settings is None:
        raise BadArgument(location, "the optimizer's settings are unknown", "pass optimizer= in Python")
    if not spec.startswith("torch.optim.") and not overrides.trust_code:
        message = f"the optimizer is {spec}; importing it would run that module's code"
        raise BadArgument(location, message, "pass --trust-code, or optimizer= in Python")
    optimizer_class = import_object(spec, "an optimizer", "torch.optim:Adam")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise BadArgument(location, f"{spec} is not an optimizer", "pass optimizer= in Python")
    create: Callable[..., torch.optim.Optimizer] = optimizer_class
    values = filter_arguments(create, settings)
    return lambda parameters: create(parameters, **values)


def choose_records(
    description: RunDescription, overrides: AuditOverrides, model: nn.Module
) -> tuple[list[UserRecords], UserRecords, str]:
    """Return the clients' records, the test records, and a description of their source."""
    if overrides.clients is not None:
        if overrides.test is None:
            raise BadArgument(
                "audit", "clients= requires test=", "pass test= with records that were not used for training"
            )
        return list(overrides.clients), overrides.test, PASSED_RECORDS
    if overrides.data is not None:
        train = overrides.data.train
        rows = split(overrides.data, description.terms.clients or 2, seed=description.seed)
        parts: list[UserRecords] = [(part.inputs, part.targets) for part in map(train.take, rows)]
        test = overrides.test or (overrides.data.test.inputs, overrides.data.test.targets)
        return parts, test, f"the data set {overrides.data.name}, divided evenly"
    parts, test = make_stand_ins(description, model)
    return parts, test, STAND_IN_NOTICE


def make_stand_ins(description: RunDescription, model: nn.Module) -> tuple[list[UserRecords], UserRecords]:
    """Draw random records that have the right shapes and can be learnt: one cluster of points per class."""
    shape, dtype, location = description.shape, description.dtype, "stand-in records"
    fix = "pass records: --data package.module:factory, or clients= and test= in Python"
    if shape is None or dtype is None:
        raise BadArgument(location, "the records of this run consist of several tensors", fix)
    if description.loss_settings is None:
        raise BadArgument(location, f"the targets that the loss {description.loss} expects are unknown", fix)
    rng, clients = generator("stand-ins", description.seed), description.terms.clients or 2
    count, outputs = NUM_STAND_INS * (clients + 1), math.prod(description.output)
    classes = description.classes or 2
    labels = torch.randint(0, classes, (count,), generator=rng)
    if dtype.startswith(("int", "uint")):
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not sizes:
            raise BadArgument(location, "the range of the integer inputs is unknown", fix)
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
        (inputs[start : start + NUM_STAND_INS], targets[start : start + NUM_STAND_INS])
        for start in range(0, count, NUM_STAND_INS)
    ]
    return [*parts[:-1]], parts[-1]


def _describe_simulation(description: RunDescription, source: str, clients: int, rounds: int) -> str:
    """Return the sentences about the simulation that was audited instead of the run."""
    texts = read_texts()["audit"].notes
    values = {"clients": clients, "rounds": rounds, "records": NUM_STAND_INS, "source": source}
    secure = texts["simulated_secure"] if description.secure_aggregation else ""
    if source == STAND_IN_NOTICE:
        return f"{STAND_IN_NOTICE}: {texts['stand_ins'].format(**values, secure=secure)}"
    remark = "" if description.terms.remote else texts["other_records"]
    return texts["simulated"].format(**values, secure=secure, remark=remark)
