"""All errors that Fedveil raises on purpose.

FedveilError
├── BadArgument          a value that no call of this kind accepts (also a ValueError)
├── AnalysisError        the model cannot be veiled
│   ├── NotTraceable     torch.export cannot follow its forward
│   ├── HeadNotLinear    none of its Linear layers or convolutions can take additive noise
│   ├── NothingToVeil    every axis is pinned: a veil would change nothing
│   └── TooLittleCovered less of it can be perturbed than required
├── ModelMismatch        a model is not the one that was analysed or broadcast
├── Diverged             training became NaN or infinite
├── TooFewAnswers        too few clients sent a valid reply in a round, in all attempts
├── Aborted              secure aggregation stopped rather than reveal an update; has a reason
└── UpdateRefused        an update that must not be aggregated; says which client and which tensor
    ├── StaleUpdate      made for another round
    ├── ForeignUpdate    made for another model
    ├── IncompleteUpdate a tensor is missing
    ├── MisshapenUpdate  a tensor has the wrong shape or dtype
    ├── NonFiniteUpdate  a tensor holds NaN or infinity
    └── ExcessiveUpdate  exceeds a bound of the round

Messages read *where: what: why. Fix: how.* No message ever holds a secret value.
"""


class FedveilError(Exception):
    """The base class of all errors that Fedveil raises on purpose."""

    def __init__(self, where: str, what: str, fix: str | None = None) -> None:
        self.where = where
        self.what = what
        self.fix = fix
        stop = "" if what.endswith("?") else "."
        super().__init__(f"{where}: {what}{stop}" + (f"\n  Fix: {fix}" if fix else ""))


class BadArgument(FedveilError, ValueError):
    """A value that no call of this kind accepts."""


class AnalysisError(FedveilError):
    """The model cannot be veiled."""


class NotTraceable(AnalysisError):
    """torch.export cannot follow the model's forward."""


class HeadNotLinear(AnalysisError):
    """None of the model's Linear layers or convolutions can take additive noise."""


class NothingToVeil(AnalysisError):
    """Every axis of the model is pinned."""


class TooLittleCovered(AnalysisError):
    """Less of the model can be perturbed than required."""


class ModelMismatch(FedveilError):
    """A model is not the one that was analysed or broadcast."""


class Diverged(FedveilError):
    """Training became NaN or infinite."""


class TooFewAnswers(FedveilError):
    """Too few clients sent a valid reply in a round."""


class Aborted(FedveilError):
    """Secure aggregation stopped rather than reveal an update.

    Attributes:
        reason: a key of `fedveil.secagg.REASONS`, for programs; the message explains it.
    """

    def __init__(self, reason: str, where: str, what: str, fix: str | None = None) -> None:
        self.reason = reason
        super().__init__(where, what, fix)


class UpdateRefused(FedveilError):
    """An update that must not be aggregated."""


class StaleUpdate(UpdateRefused):
    """An update that was made for another round."""


class ForeignUpdate(UpdateRefused):
    """An update that was made for another model."""


class IncompleteUpdate(UpdateRefused):
    """An update without one of its tensors."""


class MisshapenUpdate(UpdateRefused):
    """An update with a tensor of the wrong shape or dtype."""


class NonFiniteUpdate(UpdateRefused):
    """An update with a tensor that holds NaN or infinity."""


class ExcessiveUpdate(UpdateRefused):
    """An update that exceeds a bound of the round."""
