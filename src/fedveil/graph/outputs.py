"""Find the tensor of predictions in what a model's forward method returns.

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
"""A choice of predictions: the name of an entry, or a function of what forward returns."""
LOGITS = "logits"
FUNCTION = "()"  # ends the name of a function, which is not sent
CHOSEN = "fedveil_output"  # the attribute of a view that holds the choice
_VIEWED: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def choose_output(model: nn.Module, output: Output | None) -> nn.Module:
    """Return a view of a model whose forward returns only the chosen tensor.

    The view shares the model's tensors, layers and hooks, and has its class and names. The model is not changed.

    Args:
        model: the model.
        output: the name of an entry of what forward returns, such as "last_hidden_state", or a function that computes
            the predictions from it. With None, the model is returned as it is.
    """
    if output is None:
        return model
    if not callable(output) and (not isinstance(output, str) or not output.isprintable() or not output):
        fix = 'pass the name of an entry, such as "logits", or a function of what forward returns'
        raise BadArgument("output", f"it is {output!r:.60}, not a name or a function", fix)
    if CHOSEN in vars(model):
        if vars(model)[CHOSEN] == output:
            return model
        raise BadArgument("output", "an output of this model has already been chosen", "pass the original model")
    view = _replace_forward(copy.copy(model), output)
    vars(view)[CHOSEN] = output
    if isinstance(output, str):
        _VIEWED[view] = ref(model)
    return view


def find_viewed(model: nn.Module) -> nn.Module:
    """Return the original of a model that is a view by name; otherwise, the model itself."""
    found = _VIEWED[model]() if model in _VIEWED else None
    return model if found is None else found


def return_predictions(model: nn.Module) -> nn.Module:
    """Make the forward of a model return only its predictions, in place; return the model."""
    return model if CHOSEN in vars(model) else _replace_forward(model, None)


def _replace_forward(model: nn.Module, output: Output | None) -> nn.Module:
    own = vars(model).get("forward")
    plain = type(model).forward if own is None else getattr(own, "__func__", None)
    if own is not None and getattr(own, "__self__", None) is not model:  # a copy would run the original model
        if output is None:
            return model
        what = "its forward method has been replaced, so it cannot be wrapped"
        raise BadArgument(type(model).__name__, what, "define forward in a class that derives from the model's")
    assert plain is not None

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> Tensor:
        return find_predictions(self, plain(self, *args, **kwargs), output)

    vars(model)["forward"] = MethodType(forward, model)
    return model


def find_predictions(model: nn.Module, returned: object, output: Output | None = None) -> Tensor:
    """Return the tensor of predictions in what forward returned; refuse an unknown or ambiguous one.

    Args:
        model: the model, for messages.
        returned: what its forward method returned.
        output: the choice, as in `choose_output`.
    """
    name = type(model).__name__
    if output is None and isinstance(returned, Tensor):
        return _check_dense(name, returned)
    if callable(output):
        found = output(returned)
        if not isinstance(found, Tensor):
            what = f"it returns {_describe(found)}, not one tensor"
            raise BadArgument("output", what, "return one tensor with a row per sample")
        return _check_dense("output", found)
    entries = _list_entries(returned)
    floats = {key: own for key, own in entries.items() if isinstance(own, Tensor) and own.is_floating_point()}
    rows = [key for key, own in floats.items() if own.dim()]  # a scalar is a loss
    names = ", ".join(floats) or "none"
    if output is not None:
        if output in floats:
            return _check_dense(name, floats[output])
        what = f"forward returns {_describe(returned)} with no floating-point tensor {output[:40]!r}, but with {names}"
        raise BadArgument(name, what, "choose one of these, or pass output=function")
    chosen = LOGITS if LOGITS in rows else rows[0] if len(rows) == 1 else None
    if chosen is None:
        several = f"several floating-point tensors: {names}" if rows else "no floating-point tensor"
        what = f"its forward method returns {_describe(returned)} with {several}"
        fix = 'choose one by name, such as output="last_hidden_state", or with a function: output=lambda out: out[0]'
        raise BadArgument(name, what, fix if rows else "return the outputs that the loss needs as one tensor")
    return _check_dense(name, floats[chosen])


def _check_dense(where: str, found: Tensor) -> Tensor:
    """Refuse predictions that no loss can be computed from."""
    if found.is_floating_point() and found.layout == torch.strided:
        return found
    kind = "" if found.layout == torch.strided else f" and layout {found.layout}"
    raise BadArgument(where, f"its predictions have dtype {found.dtype}{kind}", "return a dense tensor of real numbers")


def _list_entries(returned: object) -> dict[str, object]:
    """Return the entries of a mapping, a named tuple, a dataclass, a tuple or a list by name."""
    if isinstance(returned, Mapping):
        return {str(key): own for key, own in returned.items()}
    if isinstance(returned, tuple | list):
        return dict(zip(getattr(returned, "_fields", map(str, range(len(returned)))), returned, strict=True))
    if dataclasses.is_dataclass(returned):
        return {each.name: getattr(returned, each.name) for each in dataclasses.fields(returned)}
    return {}


def _describe(found: object) -> str:
    name = type(found).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}" + (
        f" of {len(found)}" if isinstance(found, tuple | list) else ""
    )


def chosen_output(model: nn.Module) -> Output | None:
    """Return the output that was chosen with `choose_output`."""
    found: Output | None = vars(model).get(CHOSEN)
    return found


def describe_output(output: Output | None) -> str:
    """Return the text that is sent for a choice: the name of the entry or of the function; "" for None."""
    if output is None or isinstance(output, str):
        return output or ""
    return str(getattr(output, "__qualname__", type(output).__qualname__)) + FUNCTION


def read_choice(where: str, text: str, own: Output | None) -> Output | None:
    """Return the choice that the server described; refuse one that differs from the client's own.

    Args:
        where: the function that the client called, for messages.
        text: the result of `describe_output`.
        own: the client's choice; required if the server's is a function.
    """
    if own is not None:
        if (named := describe_output(own)) != text:
            raise BadArgument(where, f"the server's output is {text[:80]!a}, but the client's is {named!a}")
        return own
    if text.endswith(FUNCTION):
        what = f"the output {text[:80]!a} is a function, which is not sent"
        raise BadArgument(where, what, f"call {where}(..., output=function)")
    return text or None
