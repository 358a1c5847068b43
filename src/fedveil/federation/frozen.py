"""Frozen parameters that clients already have: the server sends a digest instead of the values.

A client takes part only if it was configured to (`frozen="local"`); otherwise, it refuses the request before reading
its own values. The digest covers all parameters that are frozen in the client's own model. A server therefore cannot
make a client treat other parameters as frozen, and a reply reveals at most whether all of these parameters equal the
server's.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument, ModelMismatch
from fedveil.federation.protocol import Request
from fedveil.graph.build import Frozen, local_parameters
from fedveil.wire import Packed, add_prefix

FIX = 'load the server\'s base model, freeze it with requires_grad_(False), and pass frozen="local" to this client'


def digest_parameters(parameters: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes and bytes of these parameters."""
    result = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        contiguous = tensor.detach().cpu().contiguous()
        result.update(repr((name, str(contiguous.dtype), tuple(contiguous.shape))).encode())
        result.update(contiguous.reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def omit_local(packed: Packed, names: Mapping[str, Tensor]) -> Packed:
    """Return an encoded broadcast without the values of the named parameters."""
    values, tensors = packed
    omitted_names = add_prefix("parameter", dict(names))
    return values, {name: tensor for name, tensor in tensors.items() if name not in omitted_names}


def restore_local(request: Request, model: nn.Module, frozen: Frozen) -> Request:
    """Add the values of the client's own frozen parameters to a request from which the server omitted them.

    Args:
        request: the server's request.
        model: the client's model.
        frozen: whether the client is configured to use its own frozen parameters.
    """
    if frozen != "local":
        message = "the server does not send the frozen parameters, and this client is not configured to use its own"
        raise BadArgument("request", message, FIX)
    parameters = local_parameters(model)
    local_tensors = add_prefix("parameter", parameters)
    trainable = request.values.get("trainable")
    is_disjoint = isinstance(trainable, list) and parameters.keys().isdisjoint(map(str, trainable))
    if not parameters or not is_disjoint or local_tensors.keys() & request.tensors.keys():
        message = (
            "the parameters that the server sends or trains differ from those that are trainable in this client's model"
        )
        raise ModelMismatch("request", message, FIX)
    if not hmac.compare_digest(digest_parameters(parameters), request.local):
        message = "the frozen parameters of this client's model differ from the server's in name, shape, dtype or value"
        raise ModelMismatch("request", message, FIX)
    return replace(request, tensors={**request.tensors, **local_tensors})
