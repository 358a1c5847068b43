"""Asks as a real server sends them, for every built-in defence; and ways to spoil any message by a seeded `Random`."""

import json
import math

import safetensors.torch
import torch
from tests.engines import Loopback, LoopbackServer, member
from tests.oracle import built
from torch import nn

from fedveil.defences import DBCL, PPDL, SPN, Plain, Veil
from fedveil.errors import BadArgument, ModelMismatch
from fedveil.federation.client import ClientSession
from fedveil.models import mlp
from fedveil.wire import read_kind

RECORDS, INPUTS, OUTPUTS = 12, 6, 4
MOST_PASSES = 66  # gradients that a client computes: for 64 groups, the most of a veil


def net():
    return mlp(INPUTS, OUTPUTS, hidden=10)


def normed():
    return nn.Sequential(nn.Linear(INPUTS, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, OUTPUTS))


class Followed(nn.Module):
    """What follows its head is more than a rearrangement: "stacked", or with a norm "repeated"; a layer is unused."""

    def __init__(self, norm=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, 10), nn.ReLU())
        self.head = nn.Linear(10, OUTPUTS)
        self.after = nn.BatchNorm1d(OUTPUTS, affine=False) if norm else nn.Identity()
        self.unused = nn.Linear(3, 2)

    def forward(self, x):
        return torch.tanh(self.after(self.head(self.body(x))))


KINDS = {
    "plain": (Plain, normed, "squared_error"),
    "plain, local training": (lambda: Plain(local_epochs=2, local_batch=4), normed, "squared_error"),
    "veil": (Veil, normed, "squared_error"),
    "veil, a perceptron": (lambda: Veil(3), net, "squared_error"),
    "veil, 3 groups": (lambda: Veil(3), normed, "squared_error"),
    "veil, decoys": (Veil, net, "cross_entropy"),
    "veil, 3 groups and decoys": (lambda: Veil(3, decoys=4), normed, "huber"),
    "veil, stacked": (Veil, Followed, "squared_error"),
    "veil, repeated": (Veil, lambda: Followed(norm=True), "squared_error"),
    "ppdl": (lambda: PPDL(0.3, 1e-2, "median"), normed, "cross_entropy"),
    "dbcl": (DBCL, net, "squared_error"),
    "spn": (SPN, net, "cross_entropy"),
}


def records():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, INPUTS, generator=draw), torch.randint(OUTPUTS, (RECORDS,), generator=draw)


class Client:
    """A client that answers asks for one model, each as if it were its first."""

    def __init__(self, build):
        self.model, self.records = built(build).float(), records()

    def reply(self, message, **options):
        return ClientSession(self.model, self.records, client=0, **options).reply(message)

    def check(self, message):
        """Let the client check an ask; refused before any record is looked at, or no answer is ever computed."""

        def load():
            raise AssertionError("the ask was not refused before records were loaded")

        return ClientSession(self.model, load, client=0).reply(message)

    def most(self):
        """Bytes that an answer may have: `MOST_PASSES` models in float64, and the names of their tensors."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return MOST_PASSES * 8 * sum(tensor.numel() for tensor in tensors) + 2**10 * (len(tensors) + 2)


def ask_of(kind, **options):
    """The first ask of a server, and a client that it is for."""
    make, build, loss = KINDS[kind]
    seen, (inputs, targets) = [], records()
    honest = member(lambda: built(build).float(), (inputs, targets), 0)

    def answer(common, own):
        seen.append(common)
        return honest(common, own)

    options = {"loss": loss, "timeout": 60.0, "pause": 0.0, "min_answers": 1, "batch_size": 8, **options}
    engine, optimizer = Loopback({"site": answer}), lambda p: torch.optim.SGD(p, 0.1)
    LoopbackServer(engine, built(build).float(), inputs[:2], make(), optimizer, **options).fit(rounds=1)
    return seen[0], Client(build)


def unpacked(message):
    """The values and tensors of a message."""
    size = int.from_bytes(message[:8], "little")
    head = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["fedveil"])
    return head["values"], dict(sorted(safetensors.torch.load(message).items()))


def packed(values, tensors, kind="request"):
    """A message with any values and tensors."""
    head = json.dumps({"format": 2, "kind": kind, "values": values})
    return safetensors.torch.save({name: own.contiguous().clone() for name, own in tensors.items()}, {"fedveil": head})


def changed(message, tensors=None, **values):
    """An ask with other values or tensors; those of None are left out. `head`, `trainable`, ... are the broadcast's."""
    old, own = unpacked(message)
    for name, value in values.items():
        (old if name in old else old["values"])[name] = value
    own |= tensors or {}
    return packed(old, {name: tensor for name, tensor in own.items() if tensor is not None})


def faults(client, asks):
    """Of asks by name, those that are not refused before records are loaded, and what happens instead."""
    found = {}
    for name, ask in asks.items():
        try:
            client.check(ask)
        except (BadArgument, ModelMismatch):
            continue
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:100]
    return found


THINGS = [
    None, True, False, 0, 1, -1, 2, 7, 65, 2**31, 2**53, 2**63, 2**64, 10**25, 10**400, 0.5, -1.0, 1e30, 1e300,
    math.nan, math.inf, "", "x", "weight", "0.weight", "stacked", "repeated", "alike", "median", "veil", "plain",
    "ppdl", "hinge", "huber", "x" * 3000, "\ud800", "\n", [], {}, [[]], [1, 2], ["0.weight"], [None],
    {"seed": 1},
]  # fmt: skip
DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip
NUMBERS = [0.0, 1.0, -1.0, 1e30, -1e38, 1e-40, math.nan, math.inf]
INTEGERS = [-(2**63), -1, 0, 1, 2, 3, 100, 2**31, 2**63 - 1]
SETTINGS = ["seed", "rounding", "entropy", "fraction", "bits", "weight", "delta", "head", "secure", "x"]


def of_bytes(message, chance):
    """Bits flipped, pieces cut out, doubled, zeroed."""
    place, size = chance.randrange(len(message)), chance.randint(1, 64)
    start, end = message[:place], message[place + size :]
    length = chance.choice([0, 1, 8, len(message), 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
    flipped = bytes([message[place] ^ 1 << chance.randrange(8)])
    zeros = bytes(len(message) - len(start) - len(end))
    other = [start + end, start, start + zeros + end, message * 2, b"", length + message[8:]]
    return chance.choice([*[start + flipped + message[place + 1 :]] * 2, *other])


def places(tree):
    """Every container in a tree of values, with each of its keys or positions."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def of_values(message, chance):
    """Any value of the tree replaced, dropped, added, renamed, repeated."""
    values, tensors = unpacked(message)
    holder, key = chance.choice(list(places(values)))
    how = chance.choice([*["replace"] * 5, "drop", "add", "rename", "repeat", "shuffle"])
    thing = chance.choice(THINGS)
    if how == "replace":
        holder[key] = thing
    elif how == "drop":
        del holder[key]
    elif how == "add":
        trees = [tree for tree in (values, *values.values()) if isinstance(tree, dict)]
        chance.choice(trees)[chance.choice(SETTINGS)] = thing
    elif isinstance(holder, dict):
        holder[chance.choice(["", "seed", "x", key + "x"])] = holder.pop(key)
    else:
        holder[:] = holder * chance.choice([2, 500]) if how == "repeat" else chance.sample(holder, len(holder))
    return packed(values, tensors, read_kind(message))


def of_numbers(tensor, chance):
    """The same shape and dtype, other numbers: one of them or all."""
    found = tensor.clone()
    if found.numel() and not found.is_complex() and found.dtype.itemsize > 1:
        every = range(found.numel()) if chance.random() < 0.5 else [chance.randrange(found.numel())]
        for place in every:
            value = chance.choice(NUMBERS if found.is_floating_point() else INTEGERS)
            info = torch.finfo(torch.float64) if found.is_floating_point() else torch.iinfo(found.dtype)
            found.view(-1)[place] = value if isinstance(value, float) else max(info.min, min(info.max, value))
    return found


def of_shape(tensor, chance):
    """Another shape: cut, grown, flat, turned, empty, with further dims."""
    flat, first = tensor.flatten(), tensor if tensor.dim() else tensor[None]
    longer = first[:1].expand(chance.choice([2, 66, 3000]), *first.shape[1:])
    empty, many = [tensor.new_empty(0), tensor.new_empty(0, 10**9)], tensor.reshape(*[1] * 40, *tensor.shape)
    turned = [tensor[None], first[: len(first) // 2], first.transpose(0, -1)[None]]
    return chance.choice([*turned, longer, flat, flat[:1], *empty, tensor.new_zeros(()), many])


def of_tensors(message, chance):
    """Numbers, shapes, dtypes, names, more and fewer of them."""
    values, tensors = unpacked(message)
    name, other = (chance.choice(sorted(tensors)) for _ in range(2))
    how = chance.choice([*["numbers", "shape", "dtype", "scale"] * 2, "dtypes", "drop", "rename", "swap", "more"])
    if how == "numbers":
        tensors[name] = of_numbers(tensors[name], chance)
    elif how == "scale":
        factor, chosen = chance.choice([-1e4, 1e4, 1e20, 3e38]), chance.choice([[name], list(tensors)])
        tensors |= {key: tensors[key] * factor for key in chosen if tensors[key].is_floating_point()}
    elif how == "shape":
        tensors[name] = of_shape(tensors[name], chance)
    elif how == "dtype":
        tensors[name] = tensors[name].to(chance.choice(DTYPES))
    elif how == "dtypes":
        dtype = chance.choice(DTYPES)
        tensors = {key: own.to(dtype) if own.is_floating_point() else own for key, own in tensors.items()}
    elif how == "drop":
        del tensors[name]
    elif how == "rename":
        start, _, rest = name.partition("/")
        new = ["", "x", f"{start}/", f"{start}/x", f"buffer/{rest}", f"head/{rest}", name + "x"]
        tensors[chance.choice(new)] = tensors.pop(name)
    elif how == "swap":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    else:
        start = chance.choice(["", "parameter/", "buffer/", "head/", "inputs/", "passes/", "gradient/", "junk/"])
        tensors |= {f"{start}{number}": torch.zeros(0) for number in range(chance.choice([1, 5, 60, 3000]))}
    return packed(values, tensors, read_kind(message))


def mutated(message, chance):
    """A message after one or two mutations; never the message itself."""
    found, count = message, chance.choice([1, 1, 1, 2])
    while found == message or count > 0:
        count -= 1
        how = chance.choice([of_bytes, *[of_values] * 3, *[of_tensors] * 4])
        try:
            found = how(found, chance)
        except Exception:  # an earlier mutation left nothing that can be read
            if found != message:
                break
    return found
