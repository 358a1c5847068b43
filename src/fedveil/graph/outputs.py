"""Find the tensor of predictions in the output of a model's forward method.

A model may return a tensor, or a tuple, a dict, a named tuple or a dataclass (such as the outputs of Hugging Face
models) that contains it. Without a choice, the predictions are the entry "logits" or the only floating-point tensor;
otherwise, they are the entry with the chosen name, or the result of the chosen function.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MethodType
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument

Output = str | Callable[..., Tensor]
"""A choice of predictions: the name of an entry, or a function of forward's output."""
LOGITS = "logits"
FUNCTION = "()"  # ends the name of a function, which is not sent
CHOICE = "fedveil_output"  # the attribute of a view that stores the choice
_ORIGINALS: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def choose_output(model: nn.Module, output: Output | None) -> nn.Module:
    """Return a view of a model whose forward returns only the chosen tensor.

    The view shares the model's tensors, layers and hooks, and has its class and names. The model is not changed.

    Args:
        model: the model.
        output: the name of an entry of forward's output, such as "last_hidden_state", or a function that computes the
            predictions from this output. With None, the model is returned unchanged.
    """
    if output is None:
        return model
    if not callable(output) and (not isinstance(output, str) or not output.isprintable() or not output):
        fix = 'pass the name of an entry, such as "logits", or a function of the output of forward'
        raise BadArgument("output", f"expected a name or a function, got {output!r:.60}", fix)
    if CHOICE in vars(model):
        if vars(model)[CHOICE] == output:
            return model
        raise BadArgument("output", "an output of this model has already been chosen", "pass the original model")
    view = _replace_forward(copy.copy(model), output)
    vars(view)[CHOICE] = output
    if isinstance(output, str):
        _ORIGINALS[view] = ref(model)
    return view


def find_original_of_view(model: nn.Module) -> nn.Module:
    """Return the original of a view that selects an entry by name; otherwise, return the model itself."""
    original = _ORIGINALS[model]() if model in _ORIGINALS else None
    return model if original is None else original


def return_predictions(model: nn.Module) -> nn.Module:
    """Make the forward of a model return only its predictions, in place; return the model."""
    return model if CHOICE in vars(model) else _replace_forward(model, None)


def _replace_forward(model: nn.Module, output: Output | None) -> nn.Module:
    instance_forward = vars(model).get("forward")
    original_forward = type(model).forward if instance_forward is None else getattr(instance_forward, "__func__", None)
    if (
        instance_forward is not None and getattr(instance_forward, "__self__", None) is not model
    ):  # a copy would run the original model
        if output is None:
            return model
        message = "its forward method has been replaced, so it cannot be wrapped"
        raise BadArgument(type(model).__name__, message, "define forward in a subclass of the model's class")
    assert original_forward is not None

    @functools.wraps(original_forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> Tensor:
        return find_predictions(self, original_forward(self, *args, **kwargs), output)

    vars(model)["forward"] = MethodType(forward, model)
    return model


def find_predictions(model: nn.Module, forward_output: object, output: Output | None = None) -> Tensor:
    """Return the tensor of predictions in forward's output; refuse an unknown or ambiguous choice.

    Args:
        model: the model, for messages.
        forward_output: the output of its forward method.
        output: the choice, as in `choose_output`.
    """
    name = type(model).__name__
    if output is None and isinstance(forward_output, Tensor):
        return _check_dense(name, forward_output)
    if callable(output):
        result = output(forward_output)
        if not isinstance(result, Tensor):
            message = f"it returns {_describe(result)}, not one tensor"
            raise BadArgument("output", message, "return one tensor with a row per sample")
        return _check_dense("output", result)
    entries = _list_entries(forward_output)
    floats = {key: value for key, value in entries.items() if isinstance(value, Tensor) and value.is_floating_point()}
    rows = [key for key, value in floats.items() if value.dim()]  # a scalar is a loss
    names = ", ".join(floats) or "none"
    if output is not None:
        if output in floats:
            return _check_dense(name, floats[output])
        message = f"forward returns {_describe(forward_output)} without {output[:40]!r}, but with {names}"
        raise BadArgument(name, message, "choose one of these, or pass output=function")
    key = LOGITS if LOGITS in rows else rows[0] if len(rows) == 1 else None
    if key is None:
        several = f"several floating-point tensors: {names}" if rows else "no floating-point tensor"
        message = f"its forward method returns {_describe(forward_output)} with {several}"
        fix = 'choose one by name, such as output="last_hidden_state", or with a function: output=lambda out: out[0]'
        raise BadArgument(name, message, fix if rows else "return the outputs that the loss needs as one tensor")
    return _check_dense(name, floats[key])


def _check_dense(where: str, predictions: Tensor) -> Tensor:
    """Refuse predictions from which no loss can be computed."""
    if predictions.is_floating_point() and predictions.layout == torch.strided:
        return predictions
    kind = "" if predictions.layout == torch.strided else f" and layout {predictions.layout}"
    raise BadArgument(
        where, f"its predictions have dtype {predictions.dtype}{kind}", "return a dense tensor of real numbers"
    )


def _list_entries(forward_output: object) -> dict[str, object]:
    """Return the entries of a mapping, dataclass, (named) tuple or list as a dict, by name or index."""
    if isinstance(forward_output, Mapping):
        return {str(key): value for key, value in forward_output.items()}
    if isinstance(forward_output, tuple | list):
        return dict(
            zip(getattr(forward_output, "_fields", map(str, range(len(forward_output)))), forward_output, strict=True)
        )
    if dataclasses.is_dataclass(forward_output):
        return {field.name: getattr(forward_output, field.name) for field in dataclasses.fields(forward_output)}
    return {}


def _describe(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}" + (
        f" of {len(value)}" if isinstance(value, tuple | list) else ""
    )


def chosen_output(model: nn.Module) -> Output | None:
    """Return the output that was chosen with `choose_output`."""
    result: Output | None = vars(model).get(CHOICE)
    return result


def describe_output(output: Output | None) -> str:
    """Return the text that is sent for a choice: the name of the entry or of the function; "" for None."""
    if output is None or isinstance(output, str):
        return output or ""
    return str(getattr(output, "__qualname__", type(output).__qualname__)) + FUNCTION


def read_choice(where: str, text: str, client_output: Output | None) -> Output | None:
    """Return the choice that the server described; refuse a choice that differs from the client's.

    Args:
        where: the name of the function that the client called, for error messages.
        text: the result of `describe_output`.
        client_output: the client's choice; required if the server's choice is a function.
    """
    if client_output is not None:
        if (description := describe_output(client_output)) != text:
            raise BadArgument(where, f"the server's output is {text[:80]!a}, but the client's is {description!a}")
        return client_output
    if text.endswith(FUNCTION):
        message = f"the output {text[:80]!a} is a function, which is not sent"
        raise BadArgument(where, message, f"call {where}(..., output=function)")
    return text or None
