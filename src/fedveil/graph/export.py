"""Record a model's operations with torch.export, as calls to ATen functions."""

import copy
import dis
import io
import itertools
import linecache
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.sym_node import SymNode
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from fedveil.errors import AnalysisError, BadArgument, FedveilError, NotTraceable
from fedveil.graph.foreign_code import restore_generators
from fedveil.graph.inputs import Inputs, arguments, each, tensors
from fedveil.graph.operations import is_in_place, operation_name
from fedveil.graph.outputs import return_predictions
from fedveil.graph.rules.elementwise import IN_PLACE

SAMPLES = 2  # batch size of the example: torch.export treats 1 as a special case, and BatchNorm needs at least 2
EXPORT_LOCK = threading.RLock()  # exporting changes global state, so two threads would interfere
COMPARISONS = {f"{dunder}{name}{dunder}" for name in ("lt", "le", "gt", "ge") for dunder in ("", "__")}
GROUPED_PRODUCTS = {"grouped_mm", "_grouped_mm"}
MAX_COMBINED = 3  # up to this number of decisions, every combination is analysed


@dataclass(frozen=True)
class ModelGraph:
    """A model's graph and the names of its parameters and buffers.

    Attributes:
        graph: the ATen operations; each node's `meta["val"]` is its output as fake tensors.
        parameters: the parameter name of each placeholder; a tied parameter is listed under its first name.
        buffers: the buffer name of each placeholder; tied buffers are handled in the same way.
        outputs: the node of the model's predictions.
        decisions: the number of times that forward decides at random whether to skip layers.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    outputs: tuple[fx.Node, ...]
    decisions: int = 0

    @property
    def used_names(self) -> frozenset[str]:
        """The names of parameters that forward reads."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder" and node.users]
        return frozenset(self.parameters[node.name] for node in placeholders if node.name in self.parameters)


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model and make its tensors contiguous; contiguous tensors share memory with the original."""
    memo: dict[int, object] = {**find_computed(model)}
    for tensor in [*model.parameters(), *model.buffers()]:
        detached = tensor.detach()
        if not detached.is_contiguous():
            detached = torch.empty(detached.shape, dtype=detached.dtype, device=detached.device)
        memo[id(tensor)] = (
            nn.Parameter(detached, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else detached
        )
    try:
        model_copy = copy.deepcopy(model, memo)
    except Exception as error:  # an attribute may raise any exception
        message = f"it cannot be copied: {str(error)[:200] or type(error).__name__}"
        fix = "store only objects that copy.deepcopy accepts as attributes, and call functions by name in forward"
        raise AnalysisError(type(model).__name__, message, fix) from error
    for module in model_copy.modules():
        if getattr(module, "momentum", 0) is None:  # a cumulative average depends on the number of batches
            module.momentum = 0.1  # type: ignore[assignment]
    return model_copy


def find_computed(model: nn.Module) -> dict[int, Tensor]:
    """Return replacements for attributes that a pre-hook computes, such as a pruned weight, which cannot be copied."""
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return {id(tensor): tensor.detach() for tensor in attributes if not tensor.is_leaf}


def check_example(model: nn.Module, inputs: Inputs, samples: int = SAMPLES) -> Inputs:
    """Return zeros with the example's structure, this number of samples, and the model's device and dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    example_tensors = tensors(inputs)
    if not example_tensors or any(tensor.dim() == 0 for tensor in example_tensors):
        message = (
            f"example_inputs of type {type(inputs).__name__} contain no tensor, or a tensor without a batch dimension"
        )
        raise BadArgument("analyse", message, "pass a batch of the model's inputs, such as inputs[:2]")

    def zeros(tensor: Tensor) -> Tensor:
        dtype = parameter.dtype if tensor.is_floating_point() else tensor.dtype
        return torch.zeros((samples, *tensor.shape[1:]), dtype=dtype, device=parameter.device)

    return each(zeros, inputs)


@contextmanager
def silence_torch() -> Iterator[None]:
    """Suppress log messages, printed graphs and warnings from torch.export (failures, recurrent layers)."""
    with EXPORT_LOCK:
        previous = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()), _assume_assertions():
                yield
        finally:
            logging.disable(previous)


def _is_failed_assertion(step: dis.Instruction | None) -> bool:
    """Return whether an assertion fails at this instruction."""
    return step is not None and ("ASSERTION" in step.opname or step.argval is AssertionError)


@contextmanager
def _assume_assertions() -> Iterator[None]:
    """Assume that forward's assertions about input values are true; if one is false, a client's forward raises."""
    decide = SymNode.guard_bool

    def read(node: SymNode, file: str, line: int) -> bool:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "fedveil"):
            frame = frame.f_back
        code = [step for step in dis.get_instructions(frame.f_code) if step.opname not in ("TO_BOOL", "NOT_TAKEN")]
        jump, following = [*(step for step in code if step.offset >= frame.f_lasti), None, None][:2]
        if jump and "IF_FALSE" in jump.opname:
            following = next((step for step in code if step.offset == jump.argval), None)
        elif not jump or "IF_TRUE" not in jump.opname:
            following = None
        return _is_failed_assertion(following) or bool(decide(node, file, line))

    SymNode.guard_bool = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SymNode.guard_bool = decide  # type: ignore[method-assign]


def export(model: nn.Module, inputs: Inputs, samples: int = SAMPLES, skipped: Collection[int] = ()) -> ModelGraph:
    """Record the operations of a forward pass, which depend only on shapes, dtypes, modes and skipped layers."""
    model_copy, name_by_id = copy_model(model), dict[int, str]()
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: name_by_id.setdefault(id(tensor), name) for name, tensor in state}  # tied tensors have several names
    args, kwargs = arguments(check_example(model, inputs, samples))
    try:
        with silence_torch(), restore_generators(), SkipMode(skipped) as mode:
            program = torch.export.export(return_predictions(model_copy), args, kwargs, strict=False)
            if any(map(_needs_functionalization, _list_graphs(program.graph_module))):
                program = program.run_decompositions({})
    except FedveilError:
        raise
    except Exception as error:
        raise explain(model, model_copy, error) from None  # its cause prints whole graphs
    _inline_blocks(program.graph_module)
    if any("autocast" in getattr(node.target, "__name__", "") for node in program.graph.nodes):
        message = f"its forward method enables torch.autocast: {ROUNDING_REASON}"
        fix = "remove the autocast block; put torch.autocast around client_step or Federation.fit"
        raise AnalysisError(type(model).__name__, message, fix)
    program.graph.eliminate_dead_code(_has_effect)  # such as a loss for labels, or an unused pooler
    signature = program.graph_signature
    parameters = {node: names[name] for node, name in signature.inputs_to_parameters.items()}
    buffers = {node: names[name] for node, name in signature.inputs_to_buffers.items()}
    (output_node,) = (node for node in program.graph.nodes if node.op == "output")
    results = zip(output_node.args[0], signature.output_specs, strict=True)
    outputs = tuple(node for node, spec in results if spec.kind == OutputKind.USER_OUTPUT and isinstance(node, fx.Node))
    return ModelGraph(program.graph, parameters, buffers, outputs, mode.decisions)


def _list_graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [submodule.graph for submodule in module.modules() if isinstance(submodule, fx.GraphModule)]


def _inline_blocks(module: fx.GraphModule) -> None:
    """Replace each block inside torch.no_grad by its operations, in place; nothing else in the graph changes."""
    for node in [
        candidate for candidate in module.graph.nodes if operation_name(candidate) == "wrap_with_set_grad_enabled"
    ]:
        _, body, *operands = node.args
        block = getattr(module, body.target)
        _inline_blocks(block)
        placeholders = [candidate for candidate in block.graph.nodes if candidate.op == "placeholder"]
        with module.graph.inserting_before(node):
            results = module.graph.graph_copy(block.graph, dict(zip(placeholders, operands, strict=True)))
            assert isinstance(results, tuple | list)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


ROUNDING_REASON = "it rounds veiled activations differently from plain ones"


def _has_effect(node: fx.Node) -> bool:
    """Return whether a node must be kept even if the predictions do not depend on it, such as a norm's update."""
    return node.is_impure() or any(kind in operation_name(node) for kind in ("batch_norm", "instance_norm"))


def _needs_functionalization(graph: fx.Graph) -> bool:
    """Return whether the graph modifies floating-point tensors in place in a way that rules cannot follow."""
    writes = [node for node in graph.nodes if node.op == "call_function" and is_in_place(node)]
    values = [node.meta.get("val") for node in writes if operation_name(node) not in IN_PLACE]
    return any(not isinstance(value, Tensor) or value.is_floating_point() for value in values)


LIBRARY_PATHS = re.compile(r"[/\\]torch[/\\]|[/\\]fedveil[/\\]|[/\\]inspect.py$|<frozen|<string>")


def find_failure(model: nn.Module, model_copy: nn.Module, error: Exception) -> str:
    """Return the module and the line of the user's code at which a forward pass failed."""
    names = {id(module): name for name, module in model_copy.named_modules()}
    where, line = type(model).__name__, ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))  # self, whatever it is called
        if id(module) in names and names[id(module)]:
            where = f"{names[id(module)]} ({type(module).__name__})"
        if not LIBRARY_PATHS.search(frame.f_code.co_filename) and (line or id(module) in names):
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            line = f", {Path(frame.f_code.co_filename).name}:{number}" + (f" ({text})" if text else "")
    return where + line


@contextmanager
def attribute_failure(model: nn.Module, message: str, fix: str) -> Iterator[None]:
    """Convert an exception of a model's own code to a `BadArgument` that names the module and the line."""
    try:
        yield
    except (FedveilError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # users' code may raise any exception
        raise BadArgument(find_failure(model, model, error), f"{message}: {first_line(error)}", fix) from error


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, or the name of its class."""
    text = str(error).strip()
    return text.splitlines()[0][:300].rstrip(".") if text else type(error).__name__


def explain(model: nn.Module, model_copy: nn.Module, error: Exception) -> AnalysisError | BadArgument:
    """Return an error that states where the export failed and how to fix it."""
    where = find_failure(model, model_copy, error)
    text = str(error).strip()
    summary = first_line(error)
    kind = type(error).__name__
    local_values = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    if any(isinstance(value, PackedSequence) for value in local_values):
        fix = "pass padded batches without packing them, and mask the outputs beyond the end of each sequence"
        return NotTraceable(where, "torch.export cannot trace packed sequences", fix)
    if "_detect_is_causal_mask" in "".join(traceback.format_tb(error.__traceback__)):
        message = "PyTorch reads the values of the mask to find out whether it is causal"
        return NotTraceable(where, message, "pass is_causal (or tgt_is_causal) together with the mask")
    if "DataDependent" in kind or "Guard" in kind or "data-dependent" in text.lower():
        message = "its forward method reads the values of a tensor, which differ from client to client"
        fix = "replace `if`, loops, .item(), float() and int() on tensors with torch.where, masks or torch.clamp"
        return NotTraceable(where, message, fix)
    if isinstance(error, TypeError) and ("forward()" in text or ("argument" in text and "missing" in text)):
        fix = "pass positional arguments as a tuple, (first, second), and keyword arguments as a dict, {'name': tensor}"
        return BadArgument("analyse", f"example_inputs do not match the arguments of forward: {summary}", fix)
    if "numpy" in text.lower():
        return NotTraceable(where, "its forward method calls NumPy", "use torch functions instead of NumPy functions")
    if "pytree" in text.lower():
        message = "its forward method takes an object that is not a tensor, tuple, list or mapping"
        return NotTraceable(where, message, "pass the object's tensors in a tuple or a mapping")
    if match := re.match(r"submodule `(\w+)`", text):
        message = f"torch.export confuses its layer {match[1]!r} with the method of the same name"
        return NotTraceable(where, message, f"rename the layer {match[1]!r}")
    fix = "check that example_inputs have the shapes and dtypes that the model expects, and that forward runs on them"
    return NotTraceable(where, f"torch.export cannot trace its forward method: {summary}", fix)


class SkipMode(TorchFunctionMode):
    """A mode that decides comparisons of a random number with a constant, and replaces unsupported operations.

    Some models skip layers at random, as layerdrop does: `if torch.rand([]) < 0.1`. A client draws the layers to skip
    while its forward runs, so a plan must be valid for every draw. The operations are recorded once without skipping,
    once for each skipped layer and once with all of them skipped, and the plan satisfies the constraints of all these
    graphs; for up to three decisions, every combination is recorded. If layers follow one another and each is skipped
    by a separate decision, this covers every draw: an operation that reads a layer's output may also read the previous
    layer's output, so both outputs must carry the same noise.

    Attributes:
        decisions: the number of decisions so far.
    """

    def __init__(self, true_decisions: Collection[int] = ()) -> None:
        super().__init__()
        self.decisions = 0
        self._true_decisions = frozenset(true_decisions)  # the decisions for which the comparison is true
        self._random_numbers: dict[int, Tensor] = {}
        self._comparisons: dict[int, tuple[Tensor, list[bool]]] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the function, or decide a comparison."""
        name, operand = getattr(func, "__name__", ""), args[0] if args else None
        if name == "__bool__" and id(operand) in self._comparisons:
            answer = self._comparisons[id(operand)][1]
            if not answer:
                answer.append(self.decisions in self._true_decisions)
                self.decisions += 1
            return answer[0]
        run: Callable[..., object] = multiply_groups if name in GROUPED_PRODUCTS else func
        result = run(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 0:
            if name == "rand":
                self._random_numbers[id(result)] = result
            elif name in COMPARISONS and id(operand) in self._random_numbers and isinstance(args[1], int | float):
                self._comparisons[id(result)] = result, []
        return result


def multiply_groups(rows: Tensor, weights: Tensor, *, offs: Tensor, **_: object) -> Tensor:
    """Compute torch.nn.functional.grouped_mm, which fake tensors do not support in float32, with other operations."""
    group = (torch.arange(len(rows), device=rows.device).unsqueeze(1) >= offs).sum(1).clamp(max=len(weights) - 1)
    return torch.bmm(rows.unsqueeze(1), weights[group]).squeeze(1)


def combinations(decisions: int) -> list[tuple[int, ...]]:
    """Return the non-empty sets of true decisions that must be analysed."""
    numbers = range(decisions)
    if decisions <= MAX_COMBINED:
        return [combination for size in numbers for combination in itertools.combinations(numbers, size + 1)]
    return [*((number,) for number in numbers), tuple(numbers)]
