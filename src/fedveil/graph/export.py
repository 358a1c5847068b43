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
from fedveil.graph.draws import restore_generators
from fedveil.graph.inputs import Inputs, arguments, each, tensors
from fedveil.graph.operations import IN_PLACE, is_in_place, operation_name
from fedveil.graph.outputs import return_predictions

SAMPLES = 2  # batch size of the example: torch.export treats 1 as a special case, and BatchNorm needs at least 2
EXPORTING = threading.RLock()  # exporting changes global state, so two threads would interfere
COMPARISONS = {f"{dunder}{name}{dunder}" for name in ("lt", "le", "gt", "ge") for dunder in ("", "__")}
GROUPED = {"grouped_mm", "_grouped_mm"}
MAX_COMBINED = 3  # up to this number of decisions, every combination is followed


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
    def used(self) -> frozenset[str]:
        """The names of parameters that forward reads."""
        places = [node for node in self.graph.nodes if node.op == "placeholder" and node.users]
        return frozenset(self.parameters[node.name] for node in places if node.name in self.parameters)


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, making its tensors contiguous; already contiguous ones share memory with the original."""
    memo: dict[int, object] = {**find_computed(model)}
    for tensor in [*model.parameters(), *model.buffers()]:
        plain = tensor.detach()
        if not plain.is_contiguous():
            plain = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        memo[id(tensor)] = nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain
    try:
        model_copy = copy.deepcopy(model, memo)
    except Exception as error:  # an attribute may raise any exception
        what = f"it cannot be copied: {str(error)[:200] or type(error).__name__}"
        fix = "store only objects that copy.deepcopy accepts as attributes, and call functions by name in forward"
        raise AnalysisError(type(model).__name__, what, fix) from error
    for module in model_copy.modules():
        if getattr(module, "momentum", 0) is None:  # a cumulative average depends on the number of batches
            module.momentum = 0.1  # type: ignore[assignment]
    return model_copy


def find_computed(model: nn.Module) -> dict[int, Tensor]:
    """Return replacements for attributes that a pre-hook computes, such as a pruned weight, which cannot be copied."""
    found = [own for module in model.modules() for own in vars(module).values() if isinstance(own, Tensor)]
    return {id(tensor): tensor.detach() for tensor in found if not tensor.is_leaf}


def check_example(model: nn.Module, inputs: Inputs, samples: int = SAMPLES) -> Inputs:
    """Return zeros with the example's structure, this number of samples, and the model's device and dtype."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    found = tensors(inputs)
    if not found or any(tensor.dim() == 0 for tensor in found):
        what = f"example_inputs of type {type(inputs).__name__} contain no tensor, or one without a batch dimension"
        raise BadArgument("analyse", what, "pass a batch of the model's inputs, such as inputs[:2]")

    def zeros(tensor: Tensor) -> Tensor:
        dtype = first.dtype if tensor.is_floating_point() else tensor.dtype
        return torch.zeros((samples, *tensor.shape[1:]), dtype=dtype, device=first.device)

    return each(zeros, inputs)


@contextmanager
def silence_torch() -> Iterator[None]:
    """Suppress log messages, printed graphs and warnings from torch.export (failures, recurrent layers)."""
    with EXPORTING:
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()), _assume_assertions():
                yield
        finally:
            logging.disable(before)


def _fails(step: dis.Instruction | None) -> bool:
    """Return whether an assertion fails at this instruction."""
    return step is not None and ("ASSERTION" in step.opname or step.argval is AssertionError)


@contextmanager
def _assume_assertions() -> Iterator[None]:
    """Let forward assert what depends on the values of its inputs: where that is false, a client's forward raises."""
    decide = SymNode.guard_bool

    def read(own: SymNode, file: str, line: int) -> bool:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "fedveil"):
            frame = frame.f_back
        code = [step for step in dis.get_instructions(frame.f_code) if step.opname not in ("TO_BOOL", "NOT_TAKEN")]
        jump, following = [*(step for step in code if step.offset >= frame.f_lasti), None, None][:2]
        if jump and "IF_FALSE" in jump.opname:
            following = next((step for step in code if step.offset == jump.argval), None)
        elif not jump or "IF_TRUE" not in jump.opname:
            following = None
        return _fails(following) or bool(decide(own, file, line))

    SymNode.guard_bool = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SymNode.guard_bool = decide  # type: ignore[method-assign]


def export(model: nn.Module, inputs: Inputs, samples: int = SAMPLES, skipped: Collection[int] = ()) -> ModelGraph:
    """Record the operations of a forward pass, which depend only on shapes, dtypes, modes, and what is skipped."""
    model_copy, first = copy_model(model), dict[int, str]()
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state}  # tied tensors have several names
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
        what = f"its forward method enables torch.autocast: {ROUNDING}"
        fix = "remove the autocast block; put torch.autocast around client_step or Federation.fit"
        raise AnalysisError(type(model).__name__, what, fix)
    program.graph.eliminate_dead_code(_has_effect)  # such as a loss of labels, or a pooler that is not chosen
    signature = program.graph_signature
    parameters = {node: names[name] for node, name in signature.inputs_to_parameters.items()}
    buffers = {node: names[name] for node, name in signature.inputs_to_buffers.items()}
    (last,) = (node for node in program.graph.nodes if node.op == "output")
    results = zip(last.args[0], signature.output_specs, strict=True)
    outputs = tuple(own for own, spec in results if spec.kind == OutputKind.USER_OUTPUT and isinstance(own, fx.Node))
    return ModelGraph(program.graph, parameters, buffers, outputs, mode.asked)


def _list_graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [own.graph for own in module.modules() if isinstance(own, fx.GraphModule)]


def _inline_blocks(module: fx.GraphModule) -> None:
    """Replace each block inside torch.no_grad by its operations, in place; nothing else in the graph changes."""
    for node in [own for own in module.graph.nodes if operation_name(own) == "wrap_with_set_grad_enabled"]:
        _, body, *operands = node.args
        block = getattr(module, body.target)
        _inline_blocks(block)
        places = [own for own in block.graph.nodes if own.op == "placeholder"]
        with module.graph.inserting_before(node):
            results = module.graph.graph_copy(block.graph, dict(zip(places, operands, strict=True)))
            assert isinstance(results, tuple | list)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


ROUNDING = "it rounds veiled activations differently from plain ones"


def _has_effect(node: fx.Node) -> bool:
    """Return whether a node must be kept even if the predictions do not depend on it: norms update their buffers."""
    return node.is_impure() or any(kind in operation_name(node) for kind in ("batch_norm", "instance_norm"))


def _needs_functionalization(graph: fx.Graph) -> bool:
    """Return whether the graph modifies floating-point tensors in place in a way that rules cannot follow."""
    writes = [node for node in graph.nodes if node.op == "call_function" and is_in_place(node)]
    values = [node.meta.get("val") for node in writes if operation_name(node) not in IN_PLACE]
    return any(not isinstance(value, Tensor) or value.is_floating_point() for value in values)


LIBRARY = re.compile(r"[/\\]torch[/\\]|[/\\]fedveil[/\\]|[/\\]inspect.py$|<frozen|<string>")


def find_failure(model: nn.Module, model_copy: nn.Module, error: Exception) -> str:
    """Return the module and the line of the user's code where a forward pass failed."""
    names = {id(module): name for name, module in model_copy.named_modules()}
    where, line = type(model).__name__, ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))  # self, whatever it is called
        if id(module) in names and names[id(module)]:
            where = f"{names[id(module)]} ({type(module).__name__})"
        if not LIBRARY.search(frame.f_code.co_filename) and (line or id(module) in names):
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            line = f", {Path(frame.f_code.co_filename).name}:{number}" + (f" ({text})" if text else "")
    return where + line


@contextmanager
def attribute_failure(model: nn.Module, what: str, fix: str) -> Iterator[None]:
    """Convert an exception of a model's own code to a `BadArgument` that names the module and the line."""
    try:
        yield
    except (FedveilError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # users' code may raise any exception
        raise BadArgument(find_failure(model, model, error), f"{what}: {first_line(error)}", fix) from error


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, or the name of its class."""
    text = str(error).strip()
    return text.splitlines()[0][:300].rstrip(".") if text else type(error).__name__


def explain(model: nn.Module, model_copy: nn.Module, error: Exception) -> AnalysisError | BadArgument:
    """Return an error that states where the export failed and how to fix it."""
    where = find_failure(model, model_copy, error)
    text = str(error).strip()
    first = first_line(error)
    kind = type(error).__name__
    local_values = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    if any(isinstance(value, PackedSequence) for value in local_values):
        fix = "pass padded batches without packing them, and mask the outputs beyond the end of each sequence"
        return NotTraceable(where, "torch.export cannot trace packed sequences", fix)
    if "_detect_is_causal_mask" in "".join(traceback.format_tb(error.__traceback__)):
        what = "PyTorch reads the values of the mask to find out whether it is causal"
        return NotTraceable(where, what, "pass is_causal (or tgt_is_causal) together with the mask")
    if "DataDependent" in kind or "Guard" in kind or "data-dependent" in text.lower():
        what = "its forward method reads the values of a tensor, which differ from client to client"
        fix = "replace `if`, loops, .item(), float() and int() on tensors with torch.where, masks or torch.clamp"
        return NotTraceable(where, what, fix)
    if isinstance(error, TypeError) and ("forward()" in text or ("argument" in text and "missing" in text)):
        fix = "pass positional arguments as a tuple, (first, second), and keyword arguments as a dict, {'name': tensor}"
        return BadArgument("analyse", f"example_inputs do not match the arguments of forward: {first}", fix)
    if "numpy" in text.lower():
        return NotTraceable(where, "its forward method calls NumPy", "use torch functions instead of NumPy functions")
    if "pytree" in text.lower():
        what = "its forward method takes an object that is not a tensor, tuple, list or mapping"
        return NotTraceable(where, what, "pass its tensors, in a tuple or a mapping")
    if found := re.match(r"submodule `(\w+)`", text):
        what = f"torch.export takes its layer {found[1]!r} for the method of this name"
        return NotTraceable(where, what, f"rename the layer {found[1]!r}")
    fix = "check that example_inputs have the shapes and dtypes that the model expects, and that forward runs on them"
    return NotTraceable(where, f"torch.export cannot trace its forward method: {first}", fix)


class SkipMode(TorchFunctionMode):
    """Decides every comparison of one random number with a constant, and replaces what fake tensors do not support.

    Some models skip layers at random, as layerdrop does: `if torch.rand([]) < 0.1`. A client draws the layers to skip
    while its forward runs, so a plan must hold for every draw. The operations are recorded once without skipping, once
    for each skipped layer and once with all of them skipped, and the plan obeys the constraints of all these graphs; up
    to three decisions, of every combination. If layers follow one another and each is skipped by a separate decision,
    this covers every draw: whatever reads the output of a layer makes its noise equal to that of the layer before,
    because it reads either.

    Attributes:
        asked: the number of decisions so far.
    """

    def __init__(self, chosen: Collection[int] = ()) -> None:
        super().__init__()
        self.asked = 0
        self._chosen = frozenset(chosen)  # the decisions for which the comparison is true
        self._drawn: dict[int, Tensor] = {}
        self._compared: dict[int, tuple[Tensor, list[bool]]] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the function, or decide."""
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name == "__bool__" and id(first) in self._compared:
            known = self._compared[id(first)][1]
            if not known:
                known.append(self.asked in self._chosen)
                self.asked += 1
            return known[0]
        run: Callable[..., object] = multiply_groups if name in GROUPED else func
        found = run(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() == 0:
            if name == "rand":
                self._drawn[id(found)] = found
            elif name in COMPARISONS and id(first) in self._drawn and isinstance(args[1], int | float):
                self._compared[id(found)] = found, []
        return found


def multiply_groups(rows: Tensor, weights: Tensor, *, offs: Tensor, **_: object) -> Tensor:
    """Compute torch.nn.functional.grouped_mm, which fake tensors do not support in float32, with other operations."""
    group = (torch.arange(len(rows), device=rows.device).unsqueeze(1) >= offs).sum(1).clamp(max=len(weights) - 1)
    return torch.bmm(rows.unsqueeze(1), weights[group]).squeeze(1)


def combinations(decisions: int) -> list[tuple[int, ...]]:
    """Return the sets of true decisions, except the empty one, that must be followed."""
    numbers = range(decisions)
    if decisions <= MAX_COMBINED:
        return [own for size in numbers for own in itertools.combinations(numbers, size + 1)]
    return [*((number,) for number in numbers), tuple(numbers)]
