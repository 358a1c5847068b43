"""The server's secret of one round (paper, Sec. 4.1, "Random noises selection")."""

import math
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.graph.plan import Plan
from fedveil.graph.solve import Integers
from fedveil.scheme.cover import Cover
from fedveil.scheme.decoys import MOST_DECOYS
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.losses import Function, Loss, SquaredError, find_loss
from fedveil.scheme.memory import cache_of

SMALLEST_SIZE, LARGEST_SIZE = 1e-30, 1e30  # of the offset
DECOYS = 2  # the default: as many passes as squared error with one group
SLOTS_AHEAD = 2**15  # of noise drawn ahead
LARGEST_FACTOR = 1e6  # beyond it, products of a few factors overflow float32

Form = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class HeadNoise:
    """The public part of the additive noise: its size, its direction (r_a) and the partition.

    The paper's gamma is the offset plus the anchor's d, which `perturb` finds and which is secret.
    """

    offset: NDArray[np.float64]
    direction: Tensor
    partition: Tensor


@dataclass(frozen=True, repr=False)
class Undo:
    """What `recover` needs to undo a broadcast."""

    cover: Cover
    coefficients: list[float]  # of the clients' passes; 0 for decoys
    counters: dict[str, Form]  # by name


class InMemory:
    """Base of what never leaves the server's memory: it cannot be pickled or copied."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"a {kind} is neither pickled nor copied: it never leaves the server's memory")

    __reduce__ = __reduce_ex__  # type: ignore[assignment]


class Secret(InMemory):
    """One-time noise for one broadcast. It prints nothing, cannot be pickled or copied, and is never reused."""

    __slots__ = ("_head", "_noise", "_undo", "decoys", "entropy", "loss", "plan", "round")

    def __init__(
        self, plan: Plan, loss: Loss, decoys: int, noise: "Noise", head: HeadNoise | None, entropy: Entropy
    ) -> None:
        self.plan, self.loss, self.decoys, self.entropy = plan, loss, decoys, entropy
        self._noise, self._head = noise, head
        self.round = entropy.token()
        self._undo: Undo | None = None

    @property
    def for_tests_only(self) -> bool:
        """Whether it is repeatable, and so not secret."""
        return self.entropy.for_tests_only

    @property
    def groups(self) -> int:
        """The paper's m; 0 if the head is exposed."""
        return len(self._head.offset) if self._head else 0

    def __repr__(self) -> str:
        return f"<Secret of round {self.round[:8]}, redacted>"


class Kept(InMemory):
    """What later secrets may share with a first one: its factors, places, direction and partition, not its offset.

    It prints nothing and cannot be pickled or copied.
    """

    __slots__ = ("_head", "_noise", "groups", "plan")

    def __init__(self, secret: Secret) -> None:
        self.plan, self.groups = secret.plan, secret.groups
        self._noise = secret._noise._replace(others=np.empty(0))  # the first offset was made of them
        self._head = (secret._head.direction, secret._head.partition) if secret._head else None

    def __repr__(self) -> str:
        return "<Kept, redacted>"

    def again(self, additive: float, entropy: Entropy) -> tuple["Noise", HeadNoise | None]:
        """The same noise with a new offset."""
        if self._head is None:
            return self._noise, None
        numbers = entropy.log_uniform(1, np.full(self.groups, math.log(2)), np.ones(self.groups, np.uint64))[0]
        return self._noise, HeadNoise(numbers * additive, *self._head)


def _check_size(name: str, value: float, least: float, most: float) -> None:
    if not (isinstance(value, int | float) and least <= value <= most):
        raise BadArgument("draw_secret", f"{name} must be a number from {least:g} to {most:g}, got {value!r}")


def _draw_members(plan: Plan, count: int, entropy: Entropy | None) -> Integers:
    """New numbers of the order classes in their kinds, one row per secret; without entropy nothing moves."""
    moves = plan.moves
    members = np.zeros((count, len(plan.cells)), dtype=np.int64)
    inside = _shuffled(moves.cells, moves.starts, count, entropy)
    blocks = np.zeros((count, 1 + len(moves.families)), dtype=np.int64)
    blocks[:, 1:] = _shuffled(moves.families, moves.first, count, entropy)
    members[:, moves.classes] = blocks[:, moves.blocks] * moves.sizes + inside
    return members


def _shuffled(groups: Integers, starts: Integers, count: int, entropy: Entropy | None) -> Integers:
    """A new number within its group for each member; `starts` has where its group begins in sorted order."""
    keys = groups.astype(np.uint64) << np.uint64(40)
    random = entropy.words(count * len(groups)) if entropy else np.zeros(count * len(groups), np.uint64)
    order = np.argsort(keys + (random.reshape(count, -1) >> np.uint64(24)), axis=1, kind="stable")
    numbers = np.empty((count, len(groups)), np.int64)
    np.put_along_axis(numbers, order, np.arange(len(groups)) - np.sort(starts), 1)
    return numbers


class Noise(NamedTuple):
    """Numbers for one secret.

    Attributes:
        scale: r, one number per scale class.
        members: each order class's new number in its kind.
        factors: the factor of each scale slot of the plan.
        shifts: the shift of each order slot of the plan.
        others: log-uniform numbers for the head.
    """

    scale: NDArray[np.float64]
    members: Integers
    factors: NDArray[np.float64]
    shifts: Integers
    others: NDArray[np.float64]


Kind = tuple[float, int, bool]  # multiplicative, how many other numbers, permute


def _draw_noise(plan: Plan, kind: Kind, count: int, entropy: Entropy) -> list[Noise]:
    """Noise for `count` secrets.

    r is log-uniform in [1/bound, bound], the other numbers in [1/2, 2]; both have a random sign, r as far as its
    symmetry allows.
    """
    bound, extra, permute = kind
    width, signed = plan.freedoms
    widths = np.concatenate([width * math.log(bound), np.full(extra, math.log(2))])
    numbers = entropy.log_uniform(count, widths, np.concatenate([signed, np.ones(extra, np.uint64)]))
    r, others = numbers[:, : len(width)], numbers[:, len(width) :]
    members = _draw_members(plan, count, entropy if permute else None)
    rows = r, members, plan.slots.factors(r), plan.slots.shifts(members), others
    return [Noise(*row) for row in zip(*rows, strict=True)]


def _deal_noise(plan: Plan, kind: Kind, entropy: Entropy) -> Noise:
    """Noise that was never used before. Of small models some is drawn ahead, which costs little more."""
    if entropy.for_tests_only:
        return _draw_noise(plan, kind, 1, entropy)[0]
    ahead = cache_of(plan).noise.setdefault(kind, [])
    try:
        return ahead.pop()  # atomic, so that no other thread uses it
    except IndexError:
        count = max(1, min(16, SLOTS_AHEAD // len(plan.slots.unit)))
        first, *others = _draw_noise(plan, kind, count, entropy)
        ahead.extend(others)
        return first


def _draw_partition(outputs: int, groups: int, entropy: Entropy) -> Integers:
    """The group of each output: a random partition into `groups` non-empty parts."""
    if groups == 1:
        return np.zeros(outputs, dtype=np.int64)
    extra = entropy.words(outputs - groups) % np.uint64(groups)  # uniform up to 2^-64 x groups
    partition = np.concatenate([np.arange(groups), extra.astype(np.int64)])
    return partition[np.argsort(entropy.words(outputs))]


def _balance(sizes: NDArray[np.float64], partition: Integers, groups: int, entropy: Entropy) -> NDArray[np.float64]:
    """Sizes with random signs that sum to 0 in every group of two or more.

    The noise then does not change the head's column sums. Training often makes these small, so a client could estimate
    the noise from them.
    """
    keys = (partition.astype(np.uint64) << np.uint64(40)) + (entropy.words(len(sizes)) >> np.uint64(24))
    up = np.empty(len(sizes), np.int64)
    up[np.argsort(keys)] = np.arange(len(sizes)) % 2  # every other one, group by group, in random order
    sums = np.bincount(2 * partition + up, sizes, 2 * groups).reshape(groups, 2)
    sums[(sums == 0).any(1)] = 1.0  # a group of one
    ratio = np.sqrt(sums[:, 0] / sums[:, 1])[partition]
    return np.where(up, sizes * ratio, -sizes / ratio)


def _draw_all(plan: Plan, groups: int, additive: float, kind: Kind, entropy: Entropy) -> tuple[Noise, HeadNoise | None]:
    while True:
        noise = _deal_noise(plan, kind, entropy)
        if plan.head is None:
            return noise, None
        partition = _draw_partition(plan.head.outputs, groups, entropy)
        numbers = noise.others[groups:]
        if groups < plan.head.outputs:
            numbers = _balance(np.abs(numbers), partition, groups, entropy)
        direction = torch.from_numpy(numbers).to(plan.layout.dtype)
        if len(set(direction.tolist())) == plan.head.outputs:
            return noise, HeadNoise(noise.others[:groups] * additive, direction, torch.from_numpy(partition))


def draw_secret(
    plan: Plan,
    loss: str | Loss | Function = "squared_error",
    groups: int = 1,
    additive: float = 1.0,
    multiplicative: float = 4.0,
    *,
    permute: bool = True,
    decoys: int | None = None,
    kept: Kept | None = None,
    entropy: Entropy | None = None,
) -> Secret:
    """Draw the noise of one round.

    Paper, Sec. 4.1: positive factors r(l) for every hidden unit, a partition of the outputs into m groups, one gamma
    per group, r_a with pairwise different components. All of it is new in every call, unless `kept` is given.

    Differs from the paper: factors follow the symmetry of each axis (for example signs before BatchNorm); units also
    trade places where the network allows it; additive noise is never near 0, where it would hide nothing; r_a sums to 0
    in every group of two or more outputs.

    Args:
        plan: the result of `analyse`.
        loss: the loss that clients will use: a name (see `fedveil.scheme.LOSSES`), an object such as
            `CrossEntropy(label_smoothing=0.1)`, a function (outputs, targets) -> one value per sample, or a
            `BatchLoss`.
        groups: the paper's m, from 1 to the number of outputs.
        additive: the size of the additive noise. Any size is recovered with the same precision.
        multiplicative: bound x of the factors, which are log-uniform in [1/x, x].
        permute: also permute units secretly.
        decoys: how many false offsets of the head are sent with the true one; clients compute one gradient for each.
            Default 2, and none for squared error if nothing follows the head: its own m + 2 terms need none.
        kept: of an earlier secret, `Kept(secret)`: all but the offset is that secret's, whatever `multiplicative` and
            `permute` say. docs/defences/veil.md says what that reveals.
        entropy: `Entropy.for_tests(seed)` for repeatable tests; by default the operating system's.

    >>> import torch, fedveil
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> secret = fedveil.draw_secret(fedveil.analyse(net, torch.zeros(1, 4)), groups=2)
    >>> "redacted" in repr(secret)
    True
    """
    where, found = "draw_secret", find_loss(loss)
    _check_size("additive", additive, SMALLEST_SIZE, LARGEST_SIZE)
    _check_size("multiplicative", multiplicative, 1.0, LARGEST_FACTOR)
    outputs = plan.head.outputs if plan.head else 1
    if type(groups) is not int or not 1 <= groups <= outputs:
        fix = f"groups=1 hides as much on average and costs least; the most is groups={outputs}"
        raise BadArgument(where, f"groups must be from 1 to the model's {outputs} outputs, got {groups!r}", fix)
    check_decoys(where, decoys)
    if decoys is None:
        own_terms = isinstance(found, SquaredError) and not (plan.head and plan.head.within)
        decoys = 0 if own_terms else DECOYS
    source = entropy or Entropy()
    if kept is not None:
        if kept.plan is not plan or kept.groups != (groups if plan.head else 0):
            fix = "Kept(secret) of a secret with this plan and these groups"
            raise BadArgument(where, "the kept noise is for another plan or another number of groups", fix)
        return Secret(plan, found, decoys, *kept.again(additive, source), source)
    kind = (float(multiplicative), groups + outputs if plan.head else 0, permute)
    noise, head = _draw_all(plan, groups, additive, kind, source)
    return Secret(plan, found, decoys, noise, head, source)


def check_decoys(where: str, decoys: int | None) -> None:
    """Refuse an invalid number of decoys."""
    if decoys is not None and (type(decoys) is not int or not 1 <= decoys <= MOST_DECOYS):
        fix = f"decoys={DECOYS}: clients compute one gradient more than there are decoys"
        raise BadArgument(where, f"decoys must be from 1 to {MOST_DECOYS}, got {decoys!r}", fix)
