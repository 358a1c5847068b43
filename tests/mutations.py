"""Ways to spoil an answer, each a function of its bytes and of Hypothesis' `draw`."""

import dataclasses

import torch
from hypothesis import strategies as st

from fedveil.federation.protocol import Answer, read, write

CLAIMS = [-1, 0, 1, 2, 10**6, 10**12, 2**53, 2**53 + 1, 10**400, True, 1.5, None, "7", [1], {}]
NUMBERS = [0.0, -1.0, 1e4, -1e4, 1e20, -1e25, 1e30, 3e38, 1e-40, float("nan"), float("inf"), -1000.0]


def of_bytes(data, draw):
    """Bits flipped, pieces cut out, doubled, zeroed."""
    found, place = bytearray(data), draw(st.integers(0, len(data) - 1))
    how = draw(st.sampled_from(["flip", "cut", "end", "zeros", "twice", "empty", "length"]))
    if how == "flip":
        for _ in range(draw(st.integers(1, 8))):
            found[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    elif how == "cut":
        del found[place : place + draw(st.integers(1, 64))]
    elif how == "end":
        del found[place:]
    elif how == "zeros":
        size = min(draw(st.integers(1, 64)), len(data) - place)
        found[place : place + size] = bytes(size)
    elif how == "twice":
        found += data
    elif how == "empty":
        found.clear()
    else:
        found[:8] = draw(st.sampled_from([0, 1, 8, 2**31, 2**63, 2**64 - 1])).to_bytes(8, "little")
    return bytes(found)


def of_values(data, draw):
    """Other records, rounds, tokens, samples; values missing and added."""
    answer = read(data, Answer)
    field = draw(st.sampled_from(["records", "round", "token", "defence", "values"]))
    if field == "values":
        values = dict(answer.values)
        key = draw(st.sampled_from([*values, "more"]))
        values[key] = draw(st.sampled_from(CLAIMS))
        return _written(answer, values=values)
    claims = CLAIMS if field == "records" else [-1, 1, "x", None, True]
    return _written(answer, **{field: draw(st.sampled_from(claims))})


def of_tensors(data, draw):
    """Numbers, shapes, dtypes and names."""
    answer = read(data, Answer)
    tensors = {name: tensor.clone() for name, tensor in answer.tensors.items()}
    name = draw(st.sampled_from(sorted(tensors)))
    tensor, value = tensors[name], draw(st.sampled_from(NUMBERS))
    how = draw(st.sampled_from(["fill", "scale", "one", "all", "drop", "rename", "more", "shape", "dtype", "counter"]))
    if how == "fill" and tensor.is_floating_point():
        tensor.fill_(value)
    elif how == "scale" and tensor.is_floating_point():
        tensor.mul_(value)
    elif how == "one" and tensor.is_floating_point() and tensor.numel():
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
    elif how == "all":
        tensors = {key: own * value if own.is_floating_point() else own for key, own in tensors.items()}
    elif how == "drop":
        del tensors[name]
    elif how == "rename":
        other = draw(st.sampled_from(["", "x", name + "x", "passes/x", "gradient/", "junk/" + name]))
        tensors[other] = tensors.pop(name)
    elif how == "more":
        prefix = draw(st.sampled_from(["", "passes/", "gradient/", "buffer/", "junk/"]))
        tensors |= {f"{prefix}{k}": torch.zeros(0) for k in range(draw(st.sampled_from([1, 30, 3000])))}
    elif how == "shape":
        tensors[name] = draw(st.sampled_from([tensor[None], tensor.flatten()[:-1], torch.zeros(0), tensor.flatten()]))
    elif how == "dtype":
        tensors[name] = tensor.to(draw(st.sampled_from([torch.float16, torch.float64, torch.int64, torch.bool])))
    elif not tensor.is_floating_point():
        tensor.fill_(draw(st.sampled_from([0, 1, 2, 100, 255])))
        if tensor.dtype == torch.int64:
            tensor.fill_(draw(st.sampled_from([-(2**63), 2**63 - 1, 2**40, -1])))
    return _written(answer, tensors=tensors)


def _written(answer, **changes):
    return write(dataclasses.replace(answer, **changes))


MUTATIONS = st.sampled_from([of_bytes, of_values, of_tensors, of_tensors])
