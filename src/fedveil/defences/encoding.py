"""Encode and decode models, gradients and buffers as messages."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedveil.errors import ModelMismatch
from fedveil.graph.plan import ModelState
from fedveil.scheme.broadcast import CODE_FIX, check_trainable, match_model
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


def unpack_gradients(expected: Tensors, tensors: Tensors, position: int) -> tuple[Tensors, Tensors]:
    """Return the gradients and buffers of a client; refuse tensors that do not match `expected` or are not finite."""
    client, device = f"client {position}", next(iter(expected.values())).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    check_tensors(client, "tensor", tensors, {name: (t.shape, t.dtype) for name, t in expected.items()}, device)
    check_finite(client, "tensor", tensors)
    return strip_prefix("gradient", tensors), strip_prefix("buffer", tensors)


def pack_model(model: nn.Module) -> Packed:
    """Return a model's tensors, the names of its trainable parameters, and the paths of modules in training mode."""
    modes = [path for path, module in model.named_modules() if module.training]
    named_tensors = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    tensors = {f"{kind}/{name}": tensor.detach() for kind, items in named_tensors.items() for name, tensor in items}
    return {"trainable": list(trainable_tensors(model)), "training": modes}, tensors


def unpack_model(model: nn.Module, values: Values, tensors: Tensors) -> nn.Module:
    """Return a copy of a client's model with the values of a broadcast; refuse a broadcast of a different model."""
    result = check_fields("broadcast", values, {"trainable": list[str], "training": list[str]})
    trainable, training = set(result["trainable"]), set(result["training"])
    parameters, buffers = strip_prefix("parameter", tensors), strip_prefix("buffer", tensors)
    model_state = ModelState.read(model)
    match_model(model_state, parameters, buffers, complete=True)
    check_trainable(result["trainable"], parameters)
    unknown_paths = sorted(training - {path for path, _ in model_state.modes})
    if unknown_paths or len(training) < len(result["training"]):
        message = f"there is no module {unknown_paths[0][:80]!a}" if unknown_paths else "training lists a module twice"
        raise ModelMismatch("broadcast", message, CODE_FIX)
    received_model = copy.deepcopy(model)
    for name, parameter in received_model.named_parameters():
        parameter.data = parameters[name].to(parameter.device)
        parameter.requires_grad_(name in trainable)
    for name, buffer in received_model.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    for path, module in received_model.named_modules():
        module.training = path in training
    return received_model


def copy_buffers(model: nn.Module) -> Tensors:
    """Return copies of a model's buffers, which a forward pass may change."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def split_vector(flat: Tensor, reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into tensors with the names, shapes and dtypes of `reference`."""
    pieces = torch.split(flat, [g.numel() for g in reference.values()])
    return {name: piece.view(g.shape).to(g.dtype) for (name, g), piece in zip(reference.items(), pieces, strict=True)}
