"""A model's operations by torch.export: a few hundred calls of ATen functions, whatever its modules are."""

import copy
import linecache
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from fedveil.errors import AnalysisError, BadArgument, NotTraceable
from fedveil.graph.inputs import Inputs, arguments, each, tensors

SAMPLES = 2  # of the example; one sample is a special case to torch.export, and too few for BatchNorm


@dataclass(frozen=True)
class Exported:
    """The graph of a model, and the meaning of its placeholders.

    Attributes:
        graph: of ATen operations; each node's `meta["val"]` has its shapes.
        parameters: placeholder name -> the parameter's known name.
        buffers: placeholder name -> the buffer's known name.
        outputs: the nodes that the model returns.
        single: whether it returns exactly one tensor.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    outputs: tuple[fx.Node, ...]
    single: bool


def known_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> its first name (tied tensors have several)."""
    first: dict[int, str] = {}
    names = {}
    for kind in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in kind:
            names[name] = first.setdefault(id(tensor), name)
    return names


def stand_in(model: nn.Module) -> nn.Module:
    """A copy that shares only its values with the model; all its tensors are contiguous."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        plain = tensor.detach()
        if not plain.is_contiguous():
            plain = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        own = nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain
        memo[id(tensor)] = own
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if getattr(module, "momentum", 0) is None:  # a running mean that counts batches would read their number
            module.momentum = 0.1  # type: ignore[assignment]
    return twin


def check_example(model: nn.Module, inputs: Inputs) -> Inputs:
    """Examples of `SAMPLES` samples on the model's device; floating-point ones in its dtype."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    found = tensors(inputs)
    if not found or any(tensor.dim() == 0 for tensor in found):
        what = f"example_inputs of type {type(inputs).__name__} hold no tensor, or one without a batch dimension"
        raise BadArgument("analyse", what, "analyse(model, inputs[:2]) with inputs as the model takes them")
    return each(
        lambda t: torch.zeros(
            (SAMPLES, *t.shape[1:]), dtype=first.dtype if t.is_floating_point() else t.dtype, device=first.device
        ),
        inputs,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch.export logs when it fails, and its warnings (recurrent layers, deprecations)."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export(model: nn.Module, inputs: Inputs) -> Exported:
    """Record the operations of a forward pass; only shapes, dtypes and modes matter."""
    twin = stand_in(model)
    names = known_names(model)
    args, kwargs = arguments(check_example(model, inputs))
    _refuse_autocast()
    try:
        with _quiet():
            program = torch.export.export(twin, args, kwargs, strict=False)
            if _needs_functions(program.graph):
                program = program.run_decompositions({})
    except Exception as error:
        raise _refusal(model, twin, error) from error
    _refuse_autocast_in(model, program.graph)
    signature = program.graph_signature
    parameters = {place: names[name] for place, name in signature.inputs_to_parameters.items()}
    buffers = {place: names[name] for place, name in signature.inputs_to_buffers.items()}
    wanted = set(signature.user_outputs)
    found = {node.name: node for node in program.graph.nodes}
    outputs = tuple(found[name] for name in signature.user_outputs if isinstance(name, str) and name in found)
    spec = program.call_spec.out_spec
    return Exported(program.graph, parameters, buffers, outputs, bool(spec and spec.is_leaf()) and len(wanted) == 1)


def _refuse_autocast() -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            what = f"torch.autocast is on for {device}: it rounds veiled activations differently from plain ones"
            raise AnalysisError("analyse", what, "call it outside of torch.autocast, and train in float32")


def _refuse_autocast_in(model: nn.Module, graph: fx.Graph) -> None:
    for node in graph.nodes:
        if "autocast" in getattr(node.target, "__name__", ""):
            what = "its forward turns on torch.autocast, which rounds veiled activations differently from plain ones"
            raise AnalysisError(
                type(model).__name__, what, "remove the autocast block from forward, and train in float32"
            )


# In-place operations that change each element separately, so that an alias of the same memory keeps its noise. If the
# graph has other in-place operations, it is rewritten without them.
ELEMENTWISE = {
    "relu_", "leaky_relu_", "add_", "sub_", "hardtanh_", "sigmoid_", "tanh_", "silu_", "elu_", "celu_", "selu_",
    "hardswish_", "hardsigmoid_", "relu6_", "dropout_", "mish_", "gelu_", "clamp_", "clamp_min_", "clamp_max_",
    "exp_", "sqrt_", "rsqrt_", "neg_", "abs_", "square_", "detach_", "feature_dropout_", "threshold_",
}  # fmt: skip


def short_name(target: Any) -> str:
    """The name of an ATen operation without namespace and overload: "linear"."""
    return str(target.overloadpacket).rpartition(".")[2] if hasattr(target, "overloadpacket") else target.__name__


def _needs_functions(graph: fx.Graph) -> bool:
    """Whether the graph writes into tensors in a way that rules cannot follow."""
    for node in graph.nodes:
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        if node.target._schema.is_mutable and not _counts_batches(node) and short_name(node.target) not in ELEMENTWISE:
            return True
    return False


def _counts_batches(node: fx.Node) -> bool:
    """Whether a node only increments an integer buffer, as BatchNorm does."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point()


LOGITS = (
    "return the logits alone, by a module around it whose forward(self, **inputs) returns "
    'self.model(**inputs)["logits"] (or .logits)'
)
LIBRARY = re.compile(r"[/\\]torch[/\\]|[/\\]fedveil[/\\]|[/\\]inspect.py$|<frozen|<string>")


def _place(model: nn.Module, twin: nn.Module, error: Exception) -> str:
    """The module, and the line of the user's code, at which an export failed."""
    names = {id(module): name for name, module in twin.named_modules()}
    where, line = type(model).__name__, ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if id(module) in names and names[id(module)]:
            where = f"{names[id(module)]} ({type(module).__name__})"
        if not LIBRARY.search(frame.f_code.co_filename) and id(module) in names:
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            line = f", line {number} of {Path(frame.f_code.co_filename).name}" + (f" ({text})" if text else "")
    return where + line


def _holds(error: Exception, kind: type) -> bool:
    """Whether a function in the error's traceback held such an object."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(value, kind) for frame, _ in frames for value in frame.f_locals.values())


def _refusal(model: nn.Module, twin: nn.Module, error: Exception) -> AnalysisError | BadArgument:
    """The line of the user's code at which the export failed, and what to do about it."""
    where = _place(model, twin, error)
    text = str(error).strip()
    first = text.splitlines()[0][:300] if text else type(error).__name__
    kind = type(error).__name__
    if _holds(error, PackedSequence):
        fix = "pass padded batches without packing them, and mask the outputs behind each sequence's end"
        return NotTraceable(where, "torch.export cannot record packed sequences", fix)
    if "_detect_is_causal_mask" in "".join(traceback.format_tb(error.__traceback__)):
        what = "PyTorch looks at the values of the mask to find out whether it is causal"
        return NotTraceable(where, what, "say so: is_causal=True (tgt_is_causal=True) beside the mask, or False")
    if "DataDependent" in kind or "Guard" in kind or "data-dependent" in text.lower():
        what = "its forward looks at the values of a tensor, which change from client to client"
        fix = (
            "let no `if`, loop, .item(), float() or int() depend on the values of tensors: use torch.where, masks "
            "or torch.clamp there"
        )
        return NotTraceable(where, what, fix)
    if isinstance(error, TypeError) and ("forward()" in text or ("argument" in text and "missing" in text)):
        fix = "analyse(model, (first, second)) for positional arguments, analyse(model, {'name': tensor}) for keywords"
        return BadArgument("analyse", f"example_inputs do not fit forward: {first}", fix)
    if "numpy" in text.lower():
        return NotTraceable(where, "its forward leaves PyTorch for NumPy", "use torch functions in place of numpy's")
    if "pytree" in text.lower():
        what = "its forward takes or returns an object that is neither tensor, tuple, list nor dict"
        return NotTraceable(where, what, LOGITS)
    fix = "check that example_inputs have the shapes and dtypes that the model takes, and that forward runs on them"
    return NotTraceable(where, f"torch.export cannot record its forward: {first.rstrip('.')}", fix)
