"""The server's secret of one round (paper, Sec. 4.1, "Random noises selection")."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary

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
from fedveil.scheme.losses import Function, Loss, SquaredError, find_loss, has_a_kink
from fedveil.scheme.nodes import FEWEST, MOST, SPREAD

SMALLEST_SIZE, LARGEST_SIZE = 1e-30, 1e30  # of the offset
NARROWEST, WIDEST = 0.5, 1e6  # of the interval, in standard errors
DECOYS = 2  # the default: as many passes as squared error with one group
LARGEST_FACTOR = 1e6  # beyond it, products of a few factors overflow float32


@dataclass(frozen=True)
class HeadNoise:
    """The public part of the additive noise: its size, its direction (r_a) and the partition.

    The paper's gamma is the offset plus the anchor's d, which `perturb` finds and which is secret.
    """

    offset: NDArray[np.float64]
    direction: Tensor
    partition: Tensor


@dataclass(frozen=True, repr=False)
class How:
    """How to combine passes.

    Attributes:
        coefficients: of the passes; 0 for decoys.
        place: of the head's offset in the interval of the nodes, from -1 to 1; None without nodes.
        shift: see `nodes.Spectrum`.
    """

    coefficients: list[float]
    place: float | None = None
    shift: float = 0.0


@dataclass(frozen=True)
class Sent:
    """What `perturb` did with the secret, for `recover` to undo.

    Attributes:
        cover: factors and places of the model's tensors.
        how: how to combine the passes.
    """

    cover: Cover
    how: How


class Secret:
    """One-time noise for one broadcast. It prints nothing, cannot be pickled or copied, and is never reused."""

    __slots__ = ("_draw", "_head", "_noise", "_sent", "decoys", "entropy", "loss", "nodes", "plan", "round", "spread")

    def __init__(
        self,
        plan: Plan,
        loss: Loss,
        decoys: int,
        nodes: Callable[[float], int] | None,
        spread: float,
        draw: "Callable[[], tuple[Noise, HeadNoise | None]]",
        entropy: Entropy,
    ) -> None:
        self.plan = plan
        self.loss = loss
        self.decoys = decoys
        self.nodes = nodes
        self.spread = spread
        self.entropy = entropy
        self._draw = draw
        self._noise, self._head = draw()
        self.round = entropy.token()
        self._sent: Sent | None = None

    @property
    def for_tests_only(self) -> bool:
        """Whether it is repeatable, and so not secret."""
        return self.entropy.for_tests_only

    def redraw(self) -> None:
        """Replace the noise, which was not sent."""
        assert self._sent is None
        self._noise, self._head = self._draw()

    @property
    def groups(self) -> int:
        """The paper's m; 0 if the head is exposed."""
        return len(self._head.offset) if self._head else 0

    def __repr__(self) -> str:
        return f"<Secret of round {self.round[:8]}, redacted>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Secret is neither pickled nor copied: it never leaves the server's memory")

    __reduce__ = __reduce_ex__  # type: ignore[assignment]


def _positive(where: str, name: str, value: float, least: float, most: float) -> None:
    if not (isinstance(value, int | float) and least <= value <= most):
        raise BadArgument(where, f"{name} must be a number from {least:g} to {most:g}, got {value!r}")


def draw_numbers(plan: Plan, bound: float, extra: int, count: int, entropy: Entropy) -> NDArray[np.float64]:
    """One row per secret: r, one number per scale class, then `extra` numbers. All are log-uniform.

    r is in [1/bound, bound] with a random sign, as far as its symmetry allows; the others are in [1/2, 2] with a random
    sign.
    """
    width, signed = plan.freedoms
    widths = np.concatenate([width * math.log(bound), np.full(extra, math.log(2))])
    return entropy.log_uniform(count, widths, np.concatenate([signed, np.ones(extra, np.uint64)]))


def draw_members(plan: Plan, count: int, entropy: Entropy | None) -> Integers:
    """New numbers of the order classes in their kinds, one row per secret; without entropy nothing moves."""
    moves = plan.moves
    members = np.zeros((count, len(plan.cells)), dtype=np.int64)
    inside = _shuffled(moves.cells, moves.starts, count, entropy)
    block = np.concatenate(
        [np.zeros((count, 1), np.int64), _shuffled(moves.families, moves.first, count, entropy)], axis=1
    )
    members[:, moves.classes] = block[:, moves.blocks] * moves.sizes + inside
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


def draw_noise(plan: Plan, kind: Kind, count: int, entropy: Entropy) -> list[Noise]:
    """Noise for `count` secrets."""
    bound, extra, permute = kind
    classes = len(plan.symmetries)
    numbers = draw_numbers(plan, bound, extra, count, entropy)
    members = draw_members(plan, count, entropy if permute else None)
    factors, shifts = plan.slots.factors(numbers[:, :classes]), plan.slots.shifts(members)
    rows = numbers[:, :classes], members, factors, shifts, numbers[:, classes:]
    return [Noise(*row) for row in zip(*rows, strict=True)]


# Drawing a few secrets costs little more than drawing one, which matters for small models. Each is used once (list.pop
# is atomic), and a forked process starts with none, so that no two processes use the same.
_AHEAD: WeakKeyDictionary[Plan, dict[Kind, list[Noise]]] = WeakKeyDictionary()
_AHEAD_SLOTS = 2**15
os.register_at_fork(after_in_child=_AHEAD.clear)


def deal_noise(plan: Plan, kind: Kind, entropy: Entropy) -> Noise:
    """Noise that was never used before."""
    if entropy.for_tests_only:
        return draw_noise(plan, kind, 1, entropy)[0]
    ahead = _AHEAD.setdefault(plan, {}).setdefault(kind, [])
    try:
        return ahead.pop()
    except IndexError:
        count = max(1, min(16, _AHEAD_SLOTS // len(plan.slots.unit)))
        first, *others = draw_noise(plan, kind, count, entropy)
        ahead.extend(others)
        return first


def draw_partition(outputs: int, groups: int, entropy: Entropy) -> Integers:
    """The group of each output: a random partition into `groups` non-empty parts."""
    if groups == 1:
        return np.zeros(outputs, dtype=np.int64)
    extra = entropy.words(outputs - groups) % np.uint64(groups)  # uniform up to 2^-64 x groups
    partition = np.concatenate([np.arange(groups), extra.astype(np.int64)])
    return partition[np.argsort(entropy.words(outputs))]


def balance(sizes: NDArray[np.float64], partition: Integers, groups: int, entropy: Entropy) -> NDArray[np.float64]:
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
    found: NDArray[np.float64] = np.where(up, sizes * ratio, -sizes / ratio)
    return found


def draw_noise_and_head(
    plan: Plan, groups: int, additive: float, kind: Kind, entropy: Entropy
) -> tuple[Noise, HeadNoise | None]:
    """All random numbers of a secret."""
    while True:
        noise = deal_noise(plan, kind, entropy)
        if plan.head is None:
            return noise, None
        partition = draw_partition(plan.head.outputs, groups, entropy)
        numbers = noise.others[groups:]
        if groups < plan.head.outputs:
            numbers = balance(np.abs(numbers), partition, groups, entropy)
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
    nodes: int | Callable[[float], int] | None = None,
    spread: float = SPREAD,
    entropy: Entropy | None = None,
) -> Secret:
    """Draw the noise of one round.

    Paper, Sec. 4.1: positive factors r(l) for every hidden unit, a partition of the outputs into m groups, one gamma
    per group, r_a with pairwise different components. All of it is new in every call.

    Differs from the paper: factors follow the symmetry of each axis (for example signs before BatchNorm); units also
    trade places where the network allows it; additive noise is never near 0, where it would hide nothing; r_a sums to 0
    in every group of two or more outputs.

    Args:
        plan: the result of `analyse`.
        loss: the loss that clients will use: a name (see `fedveil.scheme.LOSSES`), an object such as
            `CrossEntropy(label_smoothing=0.1)`, a function (outputs, targets) -> one value per sample, or a
            `BatchLoss`.
        groups: the paper's m, from 1 to the number of outputs; 1 with nodes.
        additive: the size of the additive noise. Any size is recovered with the same precision.
        multiplicative: bound x of the factors, which are log-uniform in [1/x, x].
        permute: also permute units secretly.
        decoys: how many false offsets of the head are sent with the true one; clients compute one gradient for each.
            Default 2, and none for squared error if nothing follows the head: its own m + 2 terms need none.
        nodes: in place of decoys, the number of nodes of a public interval in which the head's offset lies, for a
            smooth loss other than squared error; or a function of the interval's length, such as `NodeCount`.
            `recovered.error` shows whether they were enough.
        spread: half the length of that interval, in standard errors of a client's own estimate.
        entropy: `Entropy.for_tests(seed)` for repeatable tests; by default the operating system's.

    >>> import torch, fedveil
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> secret = fedveil.draw_secret(fedveil.analyse(net, torch.zeros(1, 4)), groups=2)
    >>> "redacted" in repr(secret)
    True
    """
    where = "draw_secret"
    found = find_loss(loss)
    _positive(where, "additive", additive, SMALLEST_SIZE, LARGEST_SIZE)
    _positive(where, "multiplicative", multiplicative, 1.0, LARGEST_FACTOR)
    outputs = plan.head.outputs if plan.head else 1
    if isinstance(groups, bool) or not isinstance(groups, int) or not 1 <= groups <= outputs:
        fix = f"groups=1 hides as much on average and costs least; the most is groups={outputs}"
        raise BadArgument(where, f"groups must be from 1 to the model's {outputs} outputs, got {groups!r}", fix)
    check_decoys(where, decoys)
    if nodes is not None:
        _check_nodes(where, plan, found, groups, decoys, nodes)
    _positive(where, "spread", spread, NARROWEST, WIDEST)
    source = entropy or Entropy()
    kind = (float(multiplicative), groups + outputs if plan.head else 0, permute)

    def draw() -> tuple[Noise, HeadNoise | None]:
        return draw_noise_and_head(plan, groups, additive, kind, source)

    own_terms = isinstance(found, SquaredError) and not (plan.head and plan.head.within)
    if decoys is None:
        decoys = 0 if own_terms or nodes is not None else DECOYS
    count = None if own_terms or nodes is None else (lambda _: nodes) if isinstance(nodes, int) else nodes
    return Secret(plan, found, decoys, count, float(spread), draw, source)


def check_decoys(where: str, decoys: int | None) -> None:
    """Refuse an invalid number of decoys."""
    if decoys is None:
        return
    if isinstance(decoys, bool) or not isinstance(decoys, int) or not 1 <= decoys <= MOST_DECOYS:
        fix = f"decoys={DECOYS}: clients compute one gradient more than there are decoys"
        raise BadArgument(where, f"decoys must be from 1 to {MOST_DECOYS}, got {decoys!r}", fix)


def _check_nodes(
    where: str, plan: Plan, loss: Loss, groups: int, decoys: int | None, nodes: int | Callable[[float], int]
) -> None:
    """Refuse nodes where they cannot recover the gradient."""
    fix = f"decoys={DECOYS} in place of nodes"
    if decoys is not None:
        raise BadArgument(where, f"decoys={decoys} and nodes exclude one another", "use one of them")
    if isinstance(nodes, int) and not FEWEST <= nodes <= MOST:
        raise BadArgument(where, f"nodes must be from {FEWEST} to {MOST}, got {nodes}")
    if groups > 1 and not isinstance(loss, SquaredError):
        what = f"nodes recover {loss.name} along one secret number, not along groups={groups}"
        raise BadArgument(where, what, fix)
    if has_a_kink(loss):
        raise BadArgument(where, f"{loss.name} has a kink, and nodes recover smooth losses only", fix)
    if plan.head and plan.head.within:
        what = f"nodes need a model that ends in the masked layer, and other operations follow {plan.head.path}"
        raise BadArgument(where, what, fix)
