"""The description of a run: settings and shapes that an audit needs, without secrets, records or values."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError, with_config
from torch import Tensor, nn

from fedveil.defences.description import class_name, describe_defence
from fedveil.errors import BadArgument
from fedveil.federation.rounds import ClearRound
from fedveil.files import write_atomically
from fedveil.graph.outputs import chosen_output, describe_output
from fedveil.plain_json import read_json, to_json
from fedveil.records.encoding import Encoding, NumbersEncoding, OutputForm, OutputKind, TensorForm
from fedveil.records.inputs import tensors_by_path
from fedveil.scheme.losses import CLASS_LOSSES, LOSSES, CrossEntropy, Poisson
from fedveil.scheme.outputs import are_class_indices, head_axis
from fedveil.scheme.token_losses import TokenCrossEntropy
from fedveil.scheme.torch_losses import is_module

if TYPE_CHECKING:
    from fedveil.federation.fitting import Evaluation
    from fedveil.federation.server import Server

DESCRIPTION = "audit.json"
SCHEMA = 1  # version of the file's format
PlainValues = dict[str, JsonValue]


@dataclass(frozen=True)
class RunTerms:
    """The part of a description that depends on the engine.

    Attributes:
        remote: whether the clients run on other machines, so that the server has none of their records.
        clients: number of clients; 0 if none has answered yet.
        sizes: number of records of each client; None if they are remote.
        batch_size: number of records that a client processes at a time.
        whole_shard: whether clients go through all their records in a round.
    """

    remote: bool
    clients: int
    sizes: list[int] | None
    batch_size: int
    whole_shard: bool


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class RunDescription:
    """The description of a run.

    Attributes:
        version: version of Fedveil that wrote the description.
        server: class of the server, such as `fedveil.flower.server:Server`.
        terms: the part that depends on the engine.
        defence: names, class and arguments of the defence (`fedveil.defences.description`).
        model, parameters: class and number of parameters of the model.
        factory: the class, as `package.module:Name`, if it can be built without arguments and no output was chosen;
            otherwise None.
        loss: name of the loss.
        loss_settings: settings of the loss; None if it is a user's function.
        optimizer: class of the optimizer.
        optimizer_settings: settings of the optimizer; None if its parameter groups differ.
        shape, dtype: shape and dtype of one record; None if a record consists of several tensors.
        output: shape of the model's output for one record.
        classes: number of classes; None if targets are quantities, or the loss is a user's function.
        clip_norm, participation, rounds_per_epoch, seed, limits, secure_aggregation: as for `fedveil.Federation`.
    """

    version: str
    server: str
    terms: RunTerms
    defence: PlainValues
    model: str
    parameters: int
    factory: str | None
    loss: str
    loss_settings: PlainValues | None
    optimizer: str
    optimizer_settings: PlainValues | None
    shape: list[int] | None
    dtype: str | None
    output: list[int]
    classes: int | None
    clip_norm: float | None
    participation: float
    rounds_per_epoch: int
    seed: int
    limits: PlainValues | None
    secure_aggregation: bool


def describe_run(server: "Server") -> RunDescription:
    """Describe the run of a server."""
    from fedveil.federation.targets import one_output

    example, loss = server.example, server.loss
    record = example if isinstance(example, Tensor) else None
    was_training = server.model.training
    output = one_output(server.model, example)
    server.model.train(was_training)
    is_known = loss.name in LOSSES or is_module(loss.name)
    model_class = class_name(type(server.model))
    return RunDescription(
        version=metadata.version("fedveil"),
        server=class_name(type(server)),
        terms=server.terms,
        defence=describe_defence(server.defence),
        model=model_class,
        parameters=sum(parameter.numel() for parameter in server.model.parameters()),
        factory=model_class if _has_factory(type(server.model)) and chosen_output(server.model) is None else None,
        loss=loss.name,
        loss_settings=_plain_settings(loss.settings()) if is_known else None,
        optimizer=class_name(type(server.optimizer)),
        optimizer_settings=_optimizer_settings(server.optimizer),
        shape=None if record is None else list(record.shape[1:]),
        dtype=None if record is None else str(record.dtype).removeprefix("torch."),
        output=list(output.shape[1:]),
        classes=output.shape[1] if isinstance(loss, CLASS_LOSSES) and output.dim() > 1 else None,
        clip_norm=server.clip_norm,
        participation=server.policy.participation,
        rounds_per_epoch=server.rounds_per_epoch,
        seed=server.seed,
        limits=None if server.limits is None else _plain_settings(asdict(server.limits)),
        secure_aggregation=not isinstance(server.rounds, ClearRound),
    )


def describe_encoding(server: "Server", encoding: Encoding, evaluation: "Evaluation | None") -> Encoding:
    """Add the forms of the model's inputs and outputs, and labels for unnamed classes, to a run's encoding.

    No statistics of clients' records are added; any statistics in `encoding` come from the user's program.
    """
    from fedveil.federation.targets import one_output

    tensors = {
        path: TensorForm(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
        for path, tensor in tensors_by_path(server.example).items()
    }
    output = one_output(server.model, server.example)
    form = _describe_outputs(server, output, encoding, evaluation.target if evaluation else None)
    classes = encoding.classes
    if form.kind in ("softmax", "scores") or (form.kind == "sigmoid" and output.numel() == 1):
        count = output.shape[form.class_axis] if form.kind != "sigmoid" else 2
        classes = (*classes[:count], *range(len(classes), count))  # unnamed classes are labelled with their indices
    inputs = encoding.inputs
    if inputs == NumbersEncoding() and server.columns:
        inputs = NumbersEncoding(server.columns)
    return replace(encoding, inputs=inputs, classes=classes, tensors=tensors, outputs=form)


def _describe_outputs(server: "Server", output: Tensor, encoding: Encoding, target: Tensor | None) -> OutputForm:
    """Return the form of a model's outputs, given the output for one record and, if known, the record's target."""
    from fedveil.federation.evaluate import LOG_PROBABILITIES, is_binary_loss

    loss, shape = server.loss, tuple(output.shape[1:])
    axis = (head_axis(server.model) or -1) if output.dim() > 2 else -1
    if output.dim() > 2 and (loss.name in LOG_PROBABILITIES or getattr(loss, "average_positions", False)):
        axis = 1  # as in torch
    has_indices = target is not None and are_class_indices(output, target)
    kind: OutputKind = "values"
    if is_binary_loss(loss):
        kind = "sigmoid"
    elif isinstance(loss, CrossEntropy | TokenCrossEntropy) or loss.name in LOG_PROBABILITIES:
        kind = "softmax"
    elif isinstance(loss, Poisson):
        kind = "exponential"
    elif isinstance(loss, CLASS_LOSSES) or has_indices or (encoding.classes and shape == (len(encoding.classes),)):
        kind = "scores"
    return OutputForm(kind, shape, axis, describe_output(chosen_output(server.model)))


def _has_factory(module_class: type[nn.Module]) -> bool:
    """Return whether a class can be imported by its name and called without arguments."""
    import inspect

    if (
        module_class.__module__ == "__main__"
        or module_class.__module__.startswith("torch.")
        or "<locals>" in module_class.__qualname__
    ):
        return False
    try:
        parameters = inspect.signature(module_class).parameters.values()
    except ValueError:  # some classes have no signature
        return False
    variadic_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(parameter.default is not parameter.empty or parameter.kind in variadic_kinds for parameter in parameters)


def _plain_settings(values: Mapping[str, object]) -> PlainValues | None:
    """Return settings as plain values, with tensors as lists, or None if a setting cannot be converted."""
    result: PlainValues = {}
    for name, value in values.items():
        plain_value = (
            value.tolist() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
        )
        if isinstance(plain_value, float) and not math.isfinite(plain_value):
            return None
        if plain_value is not None and not isinstance(plain_value, bool | int | float | str | list):
            return None
        result[name] = plain_value
    return result


def _optimizer_settings(optimizer: torch.optim.Optimizer) -> PlainValues | None:
    """Return the settings of an optimizer, with its initial learning rate; None if its parameter groups differ."""
    groups = [{name: group[name] for name in optimizer.defaults if name in group} for group in optimizer.param_groups]
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    if any(group != groups[0] for group in groups) or any(rate != rates[0] for rate in rates):
        return None
    return _plain_settings(groups[0] | ({} if rates[0] is None else {"lr": float(rates[0])}))


def write_description(server: "Server", folder: Path) -> None:
    """Write the description of a run to its folder, unless the file is up to date."""
    text = to_json({"schema": SCHEMA, **asdict(describe_run(server))}, indent=1) + "\n"
    path = folder / DESCRIPTION
    if not path.is_file() or path.read_text() != text:
        write_atomically(path, text)


def read_description(folder: Path) -> RunDescription:
    """Read the description of a run; refuse unknown schemas and invalid values."""
    path = folder / DESCRIPTION
    values = read_json(path)
    fix = "audit it with the version of Fedveil that wrote it, or train again"
    if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
        writer = f" by Fedveil {values['version']}" if isinstance(values, dict) and "version" in values else ""
        raise BadArgument(str(path), f"was written{writer} with a schema other than {SCHEMA}", fix)
    try:
        return TypeAdapter(RunDescription).validate_python(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        message = f"{'.'.join(map(str, first_error['loc']))} is not valid: {first_error['msg']}"
        raise BadArgument(str(path), message, fix) from error
