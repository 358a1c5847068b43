"""Frozen parameters that clients have: the server sends a digest of them instead of their values.

A client takes part only if it was configured to (`frozen="local"`); otherwise, it refuses before reading its own
values. The digest covers all parameters that are frozen in the client's own model: a server cannot have other
parameters treated as frozen, and an answer reveals at most whether the client has exactly the server's base, not
whether it has a part of it.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument, ModelMismatch
from fedveil.federation.protocol import Ask
from fedveil.graph.build import Frozen, local_parameters
from fedveil.wire import Packed, add_prefix

FIX = 'load the base that the server uses, freeze it with requires_grad_(False), and pass frozen="local" to this client'


def digest_parameters(parameters: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes and bytes of these parameters."""
    result = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        plain = tensor.detach().cpu().contiguous()
        result.update(repr((name, str(plain.dtype), tuple(plain.shape))).encode())
        result.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def omit_local(packed: Packed, names: Mapping[str, Tensor]) -> Packed:
    """Return an encoded broadcast without the values of these parameters."""
    values, tensors = packed
    omitted = add_prefix("parameter", dict(names))
    return values, {name: tensor for name, tensor in tensors.items() if name not in omitted}


def restore_local(ask: Ask, model: nn.Module, frozen: Frozen) -> Ask:
    """Return an ask with the values of the client's own frozen parameters in place of those that the server omitted.

    Args:
        ask: the server's ask.
        model: the client's model.
        frozen: whether the client is configured to use its own frozen parameters.
    """
    if frozen != "local":
        what = "the server does not send the frozen parameters, and this client is not configured to use its own"
        raise BadArgument("ask", what, FIX)
    parameters = local_parameters(model)
    sent = add_prefix("parameter", parameters)
    trained = ask.values.get("trainable")
    disjoint = isinstance(trained, list) and parameters.keys().isdisjoint(map(str, trained))
    if not parameters or not disjoint or sent.keys() & ask.tensors.keys():
        what = "the parameters that the server sends or trains are not those that are trainable in this client's model"
        raise ModelMismatch("ask", what, FIX)
    if not hmac.compare_digest(digest_parameters(parameters), ask.local):
        what = "the frozen parameters of this client's model differ from the server's in name, shape, dtype or value"
        raise ModelMismatch("ask", what, FIX)
    return replace(ask, tensors={**ask.tensors, **sent})
