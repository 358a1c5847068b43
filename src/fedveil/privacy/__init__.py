"""Differential privacy: settings, per-record gradients, noise and privacy accounting."""

from fedveil.privacy.settings import Privacy

__all__ = ["Privacy"]
