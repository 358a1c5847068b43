"""The exceptions that Fedveil raises.

FedveilError
├── BadArgument          an argument is invalid (also a ValueError)
├── AnalysisError        the model cannot be veiled
│   ├── NotTraceable     torch.export cannot trace its forward
│   ├── HeadNotLinear    none of its Linear layers or convolutions can take additive noise
│   ├── NothingToVeil    every axis is pinned, so a veil would change nothing
│   ├── NotExact         its gradient would not be recovered exactly
│   └── TooLittleCovered a smaller part of it can be perturbed than min_coverage requires
├── ModelMismatch        the model differs from the one that was analysed or broadcast
├── Diverged             training diverged to NaN or infinity
├── TooFewAnswers        too few clients sent a valid reply in a round, even after all attempts
├── Aborted              secure aggregation was stopped to avoid revealing an update; see `reason`
└── UpdateRefused        an update cannot be aggregated; the message names the client and the tensor
    ├── StaleUpdate      it was computed for another round
    ├── ForeignUpdate    it was computed for another model
    ├── IncompleteUpdate a tensor is missing
    ├── MisshapenUpdate  a tensor has the wrong shape or dtype
    ├── NonFiniteUpdate  a tensor contains NaN or infinity
    └── ExcessiveUpdate  it exceeds one of the round's limits

Messages have the form *where: what is wrong. Fix: how to fix it.* They never contain a secret value.
"""


class FedveilError(Exception):
    """Base class of the exceptions that Fedveil raises."""

    def __init__(self, where: str, what: str, fix: str | None = None) -> None:
        self.where = where
        self.what = what
        self.fix = fix
        period = "" if what.endswith("?") else "."
        super().__init__(f"{where}: {what}{period}" + (f"\n  Fix: {fix}" if fix else ""))


class BadArgument(FedveilError, ValueError):
    """An argument is invalid."""


class AnalysisError(FedveilError):
    """The model cannot be veiled."""


class NotTraceable(AnalysisError):
    """torch.export cannot trace the model's forward."""


class HeadNotLinear(AnalysisError):
    """None of the model's Linear layers or convolutions can take additive noise."""


class NothingToVeil(AnalysisError):
    """Every axis of the model is pinned, so a veil would change nothing."""


class NotExact(AnalysisError):
    """The model's gradient would not be recovered exactly."""


class TooLittleCovered(AnalysisError):
    """A smaller part of the model can be perturbed than `min_coverage` requires."""


class ModelMismatch(FedveilError):
    """The model differs from the one that was analysed or broadcast."""


class Diverged(FedveilError):
    """Training diverged to NaN or infinity."""


class TooFewAnswers(FedveilError):
    """Too few clients sent a valid reply in a round, even after all attempts."""


class Aborted(FedveilError):
    """Secure aggregation was stopped to avoid revealing an update.

    Attributes:
        reason: the cause, as a key of `fedveil.secagg.REASONS`.
    """

    def __init__(self, reason: str, where: str, what: str, fix: str | None = None) -> None:
        self.reason = reason
        super().__init__(where, what, fix)


class UpdateRefused(FedveilError):
    """An update cannot be aggregated."""


class StaleUpdate(UpdateRefused):
    """An update was computed for another round."""


class ForeignUpdate(UpdateRefused):
    """An update was computed for another model."""


class IncompleteUpdate(UpdateRefused):
    """An update is missing a tensor."""


class MisshapenUpdate(UpdateRefused):
    """A tensor in an update has the wrong shape or dtype."""


class NonFiniteUpdate(UpdateRefused):
    """A tensor in an update contains NaN or infinity."""


class ExcessiveUpdate(UpdateRefused):
    """An update exceeds one of the round's limits."""
