"""Encode and decode models, gradients and buffers as messages."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedveil.errors import ModelMismatch
from fedveil.graph.plan import ModelState
from fedveil.scheme.broadcast import FIX_CODE, check_trainable, match_model
from fedveil.scheme.recover import check_finite, check_tensors
from fedveil.wire import Packed, Tensors, Values, add_prefix, check_fields, strip_prefix


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def trainable_tensors(model: nn.Module) -> Tensors:
    """Return the parameters that require gradients, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def template(model: nn.Module) -> Tensors:
    """Return tensors with the names, shapes and dtypes of the gradients and buffers that a client sends."""
    return pack_gradients(trainable_tensors(model), dict(model.named_buffers()))


def pack_gradients(gradients: Mapping[str, Tensor], buffers: Tensors) -> Tensors:
    """Return gradients and buffers in one dictionary, with the names used in messages."""
    return add_prefix("gradient", gradients) | add_prefix("buffer", buffers)


def unpack_gradients(like: Tensors, tensors: Tensors, position: int) -> tuple[Tensors, Tensors]:
    """Return the gradients and buffers of a client; refuse tensors that do not match `like` or are not finite."""
    client, device = f"client {position}", next(iter(like.values())).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    check_tensors(client, "tensor", tensors, {name: (t.shape, t.dtype) for name, t in like.items()}, device)
    check_finite(client, "tensor", tensors)
    return strip_prefix("gradient", tensors), strip_prefix("buffer", tensors)


def pack_model(model: nn.Module) -> Packed:
    """Return a model's tensors, the names of its trainable parameters, and the paths of modules in training mode."""
    modes = [path for path, module in model.named_modules() if module.training]
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    tensors = {f"{kind}/{name}": tensor.detach() for kind, named in kinds.items() for name, tensor in named}
    return {"trainable": list(trainable_tensors(model)), "training": modes}, tensors


def unpack_model(model: nn.Module, values: Values, tensors: Tensors) -> nn.Module:
    """Return a copy of a client's model with the values of a broadcast; refuse a broadcast of a different model."""
    result = check_fields("broadcast", values, {"trainable": list[str], "training": list[str]})
    trainable, training = set(result["trainable"]), set(result["training"])
    parameters, buffers = strip_prefix("parameter", tensors), strip_prefix("buffer", tensors)
    inside = ModelState.read(model)
    match_model(inside, parameters, buffers, complete=True)
    check_trainable(result["trainable"], parameters)
    unknown = sorted(training - {path for path, _ in inside.modes})
    if unknown or len(training) < len(result["training"]):
        what = f"there is no module {unknown[0][:80]!a}" if unknown else "training lists a module twice"
        raise ModelMismatch("broadcast", what, FIX_CODE)
    filled = copy.deepcopy(model)
    for name, parameter in filled.named_parameters():
        parameter.data = parameters[name].to(parameter.device)
        parameter.requires_grad_(name in trainable)
    for name, buffer in filled.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    for path, module in filled.named_modules():
        module.training = path in training
    return filled


def copy_buffers(model: nn.Module) -> Tensors:
    """Return copies of a model's buffers, which a forward pass may change."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def split_vector(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into tensors with the names, shapes and dtypes of `like`."""
    pieces = torch.split(flat, [g.numel() for g in like.values()])
    return {name: piece.view(g.shape).to(g.dtype) for (name, g), piece in zip(like.items(), pieces, strict=True)}
