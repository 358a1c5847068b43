"""The server's secrets: a `VeilSession` for a run, and a `Perturbation` for one broadcast and its updates."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn
from weakref import WeakSet

from torch import Tensor, nn

from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph.plan import Plan
from fedveil.scheme import ranges
from fedveil.scheme.decoys import Fit
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.messages import Broadcast, Update
from fedveil.scheme.noise import HeadNoise, NoiseSettings, NoiseShape, UnitNoise, draw_head, draw_units
from fedveil.scheme.perturb import perturb_model
from fedveil.scheme.recover import recover, recover_each
from fedveil.scheme.recovery import Recovery, blank_update, check_updates, refuse_non_finite
from fedveil.scheme.result import Aggregate
from fedveil.scheme.transform import BufferPool
from fedveil.wire import Tensors

_SESSIONS: "WeakSet[VeilSession]" = WeakSet()
SLOTS_AHEAD = 2**15  # of noise drawn ahead
MOST_AHEAD = 16  # rounds


class MemoryOnly:
    """Base of secrets, which never leave the server's memory: they cannot be pickled or copied, and print nothing."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"a {kind} cannot be pickled or copied: it never leaves the server's memory")

    __reduce__ = __reduce_ex__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, redacted>"


class Perturbation(MemoryOnly):
    """A perturbed model and the secret that recovers the gradient from clients' updates, for one attempt of a round.

    Attributes:
        broadcast: everything that the server sends.
    """

    def __init__(self, broadcast: Broadcast, recovery: Recovery, multiplicative: float, pool: BufferPool) -> None:
        self.broadcast = broadcast
        self._recovery: Recovery | None = recovery
        self._multiplicative, self._pool = multiplicative, pool

    @property
    def recovery(self) -> Recovery:
        """The secret; refused after `release`."""
        if self._recovery is None:
            what = "the secret of this round was released"
            raise BadArgument("recover", what, "recover the gradient before release(), or perturb the model again")
        return self._recovery

    def check(self, update: Update, position: int = 0) -> None:
        """Refuse an update that does not answer this broadcast or is not finite, as that of client `position`."""
        check_updates(self.recovery, [update], position)
        refuse_non_finite([update], position)

    def recover(self, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Aggregate:
        """Recover the weighted mean of the gradients that clients would have sent for the true model.

        May be called repeatedly until `release`. See `fedveil.scheme.recover.recover`.

        Args:
            updates: one per client.
            weights: |D_k| of each client; by default the number of samples of each update.
        """
        return recover(self.recovery, updates, weights)

    def recover_each(self, updates: Sequence[Update]) -> list[Aggregate | UpdateRefused]:
        """Recover each client's gradient separately; in place of those that are refused, return the reason."""
        return recover_each(lambda update: recover(self.recovery, [update], [1.0]), updates)

    def template(self) -> Update:
        """Return an update of this round on the meta device: names, shapes and dtypes without values."""
        return blank_update(self.recovery)

    def expect(self, update: Update, last: Mapping[str, Tensor] | None = None) -> Tensors:
        """Predict the passes of the next round from a mean update; `last` is the previous prediction."""
        return ranges.expect_passes(self.recovery, update, last)

    def bound_passes(self, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Bound each pass under this round's noise, from a prediction of `expect`."""
        return ranges.bound_passes(self.recovery, expected, self._multiplicative)

    def bound_rounding(self, rounding: Mapping[str, Sequence[float]]) -> float:
        """Bound the gradient error that rounding errors of each pass can cause."""
        return ranges.bound_rounding(self.recovery, rounding)

    def release(self, *, reuse: bool = False) -> None:
        """Drop the secret; may be called repeatedly.

        Args:
            reuse: overwrite the broadcast's large tensors with the next one. Only if nobody holds them any more.
        """
        if reuse and self._recovery is not None and self._recovery.memory is not None:
            self._pool.give(self._recovery.memory)
        self._recovery = None


@dataclass
class _State:
    """The content of a session; each noise and each fit is taken from it once."""

    process: int = field(default_factory=os.getpid)
    ahead: list[UnitNoise] = field(default_factory=list, repr=False)
    fits: list[Fit] = field(default_factory=list, repr=False)
    kept: tuple[UnitNoise, HeadNoise | None] | None = field(default=None, repr=False)
    pool: BufferPool = field(default_factory=BufferPool)


class VeilSession(MemoryOnly):
    """The server's secret state of a run. Each call of `perturb` draws new noise.

    It may be called from several threads. In a forked process it starts empty, so that no two processes share noise.

    Args:
        plan: the result of `fedveil.analyse`.
        loss: what clients minimise: a name, a loss, or a function (outputs, targets).
        settings: how much noise to draw.
        entropy: `Entropy.for_tests(seed)` for repeatable tests; by default the operating system's.
    """

    def __init__(
        self,
        plan: Plan,
        loss: str | Loss | Function,
        settings: NoiseSettings,
        entropy: Entropy | None = None,
    ) -> None:
        settings.check_groups(plan)
        self.plan, self.loss, self.settings = plan, find_loss(loss), settings
        self._entropy, self._state = entropy or Entropy(), _State()
        self.draws = 0  # of noise that is kept, which clients can see anyway
        _SESSIONS.add(self)

    def perturb(self, model: nn.Module) -> Perturbation:
        """Perturb a model with new noise; the model itself is not changed."""
        state = self._current()
        units, head = self._draw(state)
        decoys = self.settings.count_decoys(self.plan, self.loss)
        broadcast, recovery = perturb_model(
            model, self.plan, self.loss, units, head, decoys, state.fits, state.pool, self._entropy
        )
        return Perturbation(broadcast, recovery, self.settings.multiplicative, state.pool)

    def forget(self) -> None:
        """Drop noise that was drawn ahead or kept."""
        self._state = _State()

    def _current(self) -> _State:
        if self._state.process != os.getpid():
            self.forget()
        return self._state

    def _draw(self, state: _State) -> tuple[UnitNoise, HeadNoise | None]:
        if state.kept is not None:
            units, head = state.kept
            return units, head and head.renew(self.settings.additive, self._entropy)
        head = None
        while True:
            units = self._next_units(state)
            if self.plan.head is not None:
                head = draw_head(self.plan, units, self.settings, self._entropy)
            if self.plan.head is None or head is not None:
                break
        if self.settings.keep_noise:
            state.kept = units, head
            self.draws += 1
        return units, head

    def _next_units(self, state: _State) -> UnitNoise:
        """Return noise that was never used before. For small models some is drawn ahead, which costs little more."""
        head = self.plan.head
        others = self.settings.groups + head.outputs if head else 0
        shape = NoiseShape(float(self.settings.multiplicative), others, self.settings.permute)
        if self._entropy.for_tests_only:
            return draw_units(self.plan, shape, 1, self._entropy)[0]
        try:
            return state.ahead.pop()  # atomic, so that no other thread uses it
        except IndexError:
            count = max(1, min(MOST_AHEAD, SLOTS_AHEAD // len(self.plan.slots.unit)))
            first, *others_drawn = draw_units(self.plan, shape, count, self._entropy)
            state.ahead.extend(others_drawn)
            return first


def _forget_all() -> None:
    """Leave no noise of the parent in a forked process."""
    for session in list(_SESSIONS):
        session.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
