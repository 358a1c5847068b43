"""Messages: the server sends a `Broadcast`, and each client replies with an `Update`.

`pack` converts a message to plain values and tensors, which `fedveil.wire` serialises; `unpack` is its inverse.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from fedveil.checks import check_choice, is_number
from fedveil.errors import BadArgument, ModelMismatch
from fedveil.graph.build import Frozen
from fedveil.graph.export import find_computed
from fedveil.graph.foreign_code import find_original, refuse_hooks
from fedveil.graph.guards import check_sizes
from fedveil.graph.head import INNER_TAILS, TAILS, Head, Tail
from fedveil.graph.inputs import Inputs
from fedveil.graph.outputs import Output, describe_output, read_choice
from fedveil.graph.plan import ModelState
from fedveil.graph.units import reshape_along
from fedveil.scheme.losses import LOSSES, Function, Loss, SquaredError, find_loss
from fedveil.scheme.token_losses import TOKEN_LOSSES
from fedveil.scheme.torch_losses import TorchLoss, build_module, is_module
from fedveil.wire import Packed, Tensors, Values, add_prefix, check_fields, strip_prefix

MAX_GROUPS = MAX_DECOYS = 64  # the maximum number that clients accept
MAX_PASSES = MAX_GROUPS + 2  # maximum number of gradients that a client computes and sends for a batch
MAX_AXES, MAX_CLASSES = 8, 2**18  # maximum number of axes and classes of a model's outputs
MAX_SETTING = 1e100  # maximum magnitude of a numeric setting, so that products do not overflow float64
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes in which clients compute
NAMED_LOSSES: Mapping[str, type[Loss]] = {**LOSSES, **TOKEN_LOSSES}  # losses that are sent by name
CODE_FIX = "build the client's model with the same code as the server's model"


@dataclass(frozen=True, eq=False)
class PublicHead(Head):
    """The public part of the head. In the paper, the weight that is sent is base + (offset o direction) 1^T.

    Attributes:
        noisy_bias: whether the bias has the same noise, as if it were the weight of an input that is always 1. A bias
            close to zero gets no noise, because it would reveal the noise.
        direction: r_a, one number per output.
        partition: the group of each output.
        offset: the size of the noise, one number per group; the paper's gamma is this plus the anchor's secret d.
        candidates: offsets for which clients compute gradients, one per row: the true offset and decoys. Empty for
            squared error with the paper's terms.

    Raises:
        BadArgument: there are more than `MAX_GROUPS` groups or `MAX_DECOYS` decoys.
    """

    noisy_bias: bool
    direction: Tensor
    partition: Tensor
    offset: Tensor
    candidates: Tensor

    def __post_init__(self) -> None:
        if self.groups > MAX_GROUPS or len(self.candidates) > MAX_DECOYS + 1:
            message = f"got {self.groups} groups and {len(self.candidates)} candidates, more than clients accept"
            raise BadArgument("head", message, f"use at most {MAX_GROUPS} groups and {MAX_DECOYS} decoys")

    @property
    def groups(self) -> int:
        """The number of groups, m in the paper."""
        return len(self.offset)

    @property
    def has_candidates(self) -> bool:
        """Whether there are candidates."""
        return len(self.candidates) > 0

    def noise(self, outputs: Tensor) -> Tensor:
        """Return t o r_a for each candidate t, one number per output, with the dtype and device of `outputs`."""
        return (self.candidates[:, self.partition] * self.direction.double()).to(outputs)


_BROADCAST: Mapping[str, object] = {"round": str, "model": str, "trainable": list[str], "training": list[str]} | {
    "form": str,
    "plan": str,
    "local": bool,
}
_UPDATE = {"round": str, "model": str, "samples": int}
_HEAD_TENSORS = tuple(field.name for field in fields(PublicHead) if field.type is Tensor)
_HEAD = {field.name: field.type for field in fields(PublicHead) if field.type is not Tensor} | {"tail": str}


def _split_tensors(where: str, values: Values, tensors: Mapping[str, Tensor], *prefixes: str) -> list[Tensors]:
    """Return the tensors for each prefix, with the prefix removed; refuse other tensors and invalid dicts."""
    for kind, value in (("values", values), ("tensors", tensors)):
        if not isinstance(value, Mapping) or not all(type(name) is str for name in value):
            raise BadArgument(where, f"{kind} must be a dict whose keys are strings")
    groups = [strip_prefix(prefix, tensors) for prefix in prefixes]
    if sum(map(len, groups)) < len(tensors):
        unexpected = next(name for name in tensors if name.partition("/")[0] not in prefixes or "/" not in name)
        raise BadArgument(where, f"unexpected tensor {unexpected[:80]!a}")
    return groups


def resolve_loss(where: str, loss: str, loss_settings: Values, custom: Loss | None) -> Loss:
    """Return the loss with the name the server sent; a user's function is not sent and must be passed as `custom`."""
    if custom is not None and custom.name != loss:
        raise BadArgument(where, f"the server's loss is {loss!r}, but the client's is {custom.name!r}")
    if custom is None and loss not in NAMED_LOSSES and not is_module(loss):
        raise BadArgument(
            where, f"the loss {loss!r} is a custom function, which is not sent", f"call {where}(..., loss=function)"
        )
    return custom or _build_loss(loss, loss_settings)


def _build_loss(name: str, settings: Values) -> Loss:
    """Build a loss. Each setting must have the type of its default; None allows a list of numbers too."""
    default = NAMED_LOSSES[name]() if name in NAMED_LOSSES else build_module(name, {})
    defaults, result = default.settings(), dict[str, bool | int | float | str | tuple[float, ...] | None]()
    for key, value in settings.items():
        if key not in defaults:
            fix = f"use {', '.join(defaults)}" if defaults else "send no settings"
            raise BadArgument("loss", f"{name} has no setting {str(key)[:40]!a}", fix)
        is_list, is_float = defaults[key] is None and isinstance(value, list | tuple), isinstance(defaults[key], float)
        elements = value if is_list else [value] if is_float else []
        is_valid = is_list or is_float or type(value) is type(defaults[key])
        if (
            not is_valid
            or len(elements) > MAX_CLASSES
            or not all(is_number(n) and abs(n) <= MAX_SETTING for n in elements)
        ):
            expected = "a list of numbers or None" if defaults[key] is None else f"a {type(defaults[key]).__name__}"
            raise BadArgument("loss", f"{key} of {name} must be {expected}, finite and not too large")
        result[key] = tuple(map(float, value)) if is_list else float(value) if is_float else value
    try:
        return build_module(name, result) if isinstance(default, TorchLoss) else type(default)(**result)
    except BadArgument:
        raise
    except ValueError as error:  # raised by torch
        raise BadArgument("loss", f"{name} cannot be built: {error}") from error


def match_model(state: ModelState, parameters: Tensors, buffers: Tensors, *, complete: bool) -> None:
    """Refuse missing buffers, and tensors that do not match the client's model in name, shape or dtype.

    All floating-point tensors may have another dtype than the model's, because clients compute in the dtype they
    receive.

    Args:
        state: the state of the client's model.
        parameters: the parameters received.
        buffers: the buffers received.
        complete: whether every parameter must have been received.
    """
    dtypes_match = _match_shapes(parameters, state.parameters, complete=complete)
    if _match_shapes(buffers, state.buffers, complete=True) and dtypes_match:
        return
    received, expected = parameters | buffers, state.parameters | state.buffers
    floats = {value.dtype for value in received.values() if value.is_floating_point()}
    for name, value in received.items():
        dtypes = value.dtype, expected[name].dtype
        is_common_float = (
            all(kind.is_floating_point for kind in dtypes) and len(floats) == 1 and value.dtype in FLOAT_DTYPES
        )
        if dtypes[0] != dtypes[1] and not is_common_float:
            raise ModelMismatch(name, f"the broadcast has dtype {dtypes[0]}, but the model has {dtypes[1]}", CODE_FIX)


def _match_shapes(received: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, complete: bool) -> bool:
    """Refuse tensors whose names or shapes do not match; return whether all dtypes match."""
    dtypes_match = True
    for name, value in received.items():
        tensor = expected.get(name)
        if tensor is None or tensor.shape != value.shape:
            shape = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            message = f"the broadcast has shape {str(tuple(value.shape))[:80]}, but the model has {shape}"
            raise ModelMismatch(name[:80], message, CODE_FIX)
        dtypes_match = dtypes_match and value.dtype == tensor.dtype
    if complete and len(received) < len(expected):
        name = next(name for name in expected if name not in received)
        raise ModelMismatch(
            name,
            f"the broadcast has no such tensor, but the model has shape {tuple(expected[name].shape)}",
            CODE_FIX,
        )
    return dtypes_match


def check_trainable(trainable: Collection[str], parameters: Mapping[str, Tensor]) -> None:
    """Refuse an empty list of trainable parameters, duplicates, and tensors that were not sent or have no gradient."""
    differentiable = {name for name, p in parameters.items() if p.is_floating_point() or p.is_complex()}
    invalid = [name for name in trainable if name not in differentiable]
    if invalid or not trainable or len(set(trainable)) < len(trainable):
        message = f"{invalid[0][:80]!a} cannot be trained" if invalid else "trainable is empty or contains a name twice"
        raise ModelMismatch("broadcast", message, CODE_FIX)


def select_row(buffers: Tensors, row: int) -> Tensors:
    """Return one candidate's row of each floating-point buffer; counters have no rows and are returned unchanged."""
    return {name: value[row] if value.is_floating_point() else value for name, value in buffers.items()}


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The complete message that the server sends in a round.

    Attributes:
        round, model: the names of the round and of the architecture, which the update repeats.
        loss: the loss that clients minimise.
        parameters: the perturbed parameters; the head is anchored, without its public offset.
        buffers: the perturbed buffers, and the counters.
        trainable: names of the parameters whose gradients clients compute.
        training: paths of the modules in training mode; all others must be in evaluation mode.
        head: the public part of the head; None if the head is exposed.
        form, plan: the form of the inputs for which the model was analysed, and the plan's signature.
        continued: whether the client has already processed a batch for this broadcast. Buffers then have an extra
            leading dim, with one row per candidate, and contain their values after the client's last batch.
        output: the choice of predictions with which the model was analysed; None if there was no choice to make.
        local: whether frozen parameters are not perturbed, because clients already have them.
    """

    round: str
    model: str
    loss: Loss
    parameters: Tensors
    buffers: Tensors
    trainable: tuple[str, ...]
    training: tuple[str, ...]
    head: PublicHead | None
    form: str
    plan: str
    continued: bool = False
    output: Output | None = None
    local: bool = False

    def pack(self) -> Packed:
        """Return plain values and tensors."""
        tensors = add_prefix("parameter", self.parameters) | add_prefix("buffer", self.buffers)
        values: Values = {"round": self.round, "model": self.model, "form": self.form, "plan": self.plan}
        values |= {"trainable": list(self.trainable), "training": list(self.training)}
        values |= {"loss": self.loss.name, "loss_settings": self.loss.settings(), "head": None}
        values |= {"output": "" if self.output is None else describe_output(self.output), "local": self.local}
        if self.head:
            values["head"] = {name: getattr(self.head, name) for name in _HEAD}
            tensors |= add_prefix("head", {name: getattr(self.head, name) for name in _HEAD_TENSORS})
        return values, tensors

    @classmethod
    def unpack(
        cls,
        values: Values,
        tensors: Mapping[str, Tensor],
        loss: "Loss | Function | str | None" = None,
        output: Output | None = None,
    ) -> "Broadcast":
        """Restore a message from the output of `pack`. A user's functions are not sent and must be passed."""
        where = "Broadcast.unpack"
        parameters, buffers, head_tensors = _split_tensors(where, values, tensors, "parameter", "buffer", "head")
        result = check_fields(where, values, _BROADCAST)
        result |= {name: tuple(result[name]) for name in ("trainable", "training")}
        known_loss = None if loss is None else find_loss(loss)
        if known_loss is None or "loss" in values:
            known_loss = resolve_loss(
                where, **check_fields(where, values, {"loss": str, "loss_settings": dict}), custom=known_loss
            )
        check_trainable(result["trainable"], parameters)
        known_output = output
        if "output" in values:
            choice = check_fields(where, values, {"output": str})["output"]
            known_output = read_choice(where, choice, output) if choice or output is not None else None
        has_head, head = values.get("head") is not None, None
        if head_tensors.keys() != set(_HEAD_TENSORS if has_head else ()):
            expected = ", ".join(_HEAD_TENSORS) if has_head else "none"
            raise BadArgument(where, f"the head's tensors must be {expected}, got {str(sorted(head_tensors))[:200]}")
        if has_head:
            head = _read_head(where, check_fields(where, values, {"head": dict})["head"], head_tensors, parameters)
            if not head.has_candidates and (head.tail in INNER_TAILS or not isinstance(known_loss, SquaredError)):
                raise BadArgument(where, f"the head has no candidates, but the loss {known_loss.name} requires them")
        return cls(loss=known_loss, parameters=parameters, buffers=buffers, head=head, output=known_output, **result)


def _read_head(where: str, values: Values, tensors: Tensors, parameters: Tensors) -> PublicHead:
    """Read and check the public part of a head; its weight and bias must be among the parameters."""
    settings = check_fields(where, values, _HEAD)
    settings["tail"] = cast(Tail, check_choice(where, "tail", settings["tail"], TAILS))
    direction, partition, offset, candidates = (tensors[name] for name in _HEAD_TENSORS)
    weight, bias, dim = parameters.get(settings["weight"]), parameters.get(settings["bias"] or ""), settings["dim"]
    if weight is None or (bias is None) != (settings["bias"] is None):
        raise ModelMismatch("head", "the broadcast has no parameters with the names of its weight and bias", CODE_FIX)
    if weight.dim() < 2 or dim not in (0, 1) or not (settings["axis"] == -1 or 0 < settings["axis"] < MAX_AXES):
        raise ModelMismatch("head", f"a weight with {weight.dim()} dims cannot have its outputs on dim {dim}", CODE_FIX)
    outputs, groups = weight.shape[dim], offset.numel()
    checks = {
        "number of outputs": settings["outputs"] == outputs,
        "bias": bias is None or bias.shape == (outputs,),
        "direction": direction.shape == (outputs,) and direction.dtype == weight.dtype and weight.dtype in FLOAT_DTYPES,
        "offset": offset.shape == (groups,) and 0 < groups <= outputs and offset.dtype == torch.float64,
        "candidates": candidates.shape[1:] == (groups,) and candidates.dtype == torch.float64,
        "partition": partition.shape == (outputs,) and partition.dtype == torch.int64,
    }
    for name, matches in checks.items():
        if not matches:
            raise ModelMismatch("head", f"its {name} does not match {outputs} outputs in {groups} groups", CODE_FIX)
    if not 0 <= int(partition.min()) <= int(partition.max()) < groups:
        raise ModelMismatch("head", f"its partition contains groups outside the range 0 to {groups - 1}", CODE_FIX)
    return PublicHead(**(settings | tensors))


@dataclass(frozen=True, eq=False)
class Update:
    """A client's reply.

    Attributes:
        round, model: copied from the broadcast.
        samples: the number of samples that the passes are averaged over.
        passes: gradients by name, with an extra leading axis for the passes: G^, sigma~_1 ... sigma~_m and beta, or one
            pass for each of the broadcast's candidates.
        buffers: the client's perturbed buffers after its forward pass, with one row per candidate if the operations
            after the head ran once per candidate.
    """

    round: str
    model: str
    samples: int
    passes: Tensors
    buffers: Tensors

    def pack(self) -> Packed:
        """Return plain values and tensors."""
        tensors = add_prefix("passes", self.passes) | add_prefix("buffer", self.buffers)
        return {name: getattr(self, name) for name in _UPDATE}, tensors

    @classmethod
    def unpack(cls, values: Values, tensors: Mapping[str, Tensor]) -> "Update":
        """Restore a message from the output of `pack`."""
        passes, buffers = _split_tensors("Update.unpack", values, tensors, "passes", "buffer")
        return cls(**check_fields("Update.unpack", values, _UPDATE), passes=passes, buffers=buffers)


def check_inputs(model: nn.Module, broadcast: Broadcast, inputs: Inputs) -> None:
    """Refuse a batch for which the broadcast's plan is not valid."""
    frozen: Frozen = "local" if broadcast.local else "sent"
    check_sizes(model, inputs, broadcast.form, broadcast.plan, exposed=broadcast.head is None, frozen=frozen)


def check_broadcast(model: nn.Module, broadcast: Broadcast) -> ModelState:
    """Return the model's state; refuse a model whose tensors or modes do not match the broadcast.

    The broadcast contains all buffers, but no parameters that forward does not read.
    """
    state = ModelState.read(model)
    if state.hooks:
        refuse_hooks(state.hooks, type(model).__name__)
    buffers = select_row(broadcast.buffers, 0) if broadcast.continued else broadcast.buffers
    match_model(state, broadcast.parameters, buffers, complete=False)
    training = tuple([path for path, mode in state.modes if mode])
    if training != broadcast.training:
        _refuse_modes(model, training, broadcast.training)
    return state


def _refuse_modes(model: nn.Module, expected: Sequence[str], required: Sequence[str]) -> NoReturn:
    differing = sorted(set(expected) ^ set(required))
    if not differing:
        raise ModelMismatch("broadcast", "it lists modules in training mode twice or in the wrong order", CODE_FIX)
    path, mode = differing[0][:80], "train" if differing[0] in required else "eval"
    fix = f"call model.get_submodule({path!r}).{mode}()" if path else f"call model.{mode}()"
    raise ModelMismatch(path or type(model).__name__, f"the broadcast requires this module to be in {mode} mode", fix)


def client_view(model: nn.Module, broadcast: Broadcast, *, centred: bool = False) -> nn.Module:
    """Return the model as a client receives it: a copy of `model` with the broadcast's values.

    The head is base + offset, as in the paper. If `centred` is true, it is the base without the public offset. Any
    client can compute this model, and it predicts far better (docs/maths.md, "What a veil hides").
    """
    original = find_original(model)
    view = copy.deepcopy(original, dict[int, object](find_computed(original)))
    view.load_state_dict(dict(broadcast.parameters) | dict(broadcast.buffers), strict=False)
    head = broadcast.head
    if head and not centred:
        noise = head.offset[head.partition] * head.direction.double()
        move_head(view, head, noise.to(head.direction.dtype))
    return view


def move_head(model: nn.Module, head: PublicHead, noise: Tensor) -> None:
    """Add one number per output to the weights of a model's head, in place, and to its bias if the bias has noise."""
    weight = model.get_parameter(head.weight)
    with torch.no_grad():
        weight.add_(reshape_along(noise, head.dim, weight.dim()))
        if head.bias and head.noisy_bias:
            model.get_parameter(head.bias).add_(noise)
