"""Differential privacy: what a client adds to its update, what the server adds to a sum, and what both cost."""

from fedveil.privacy.settings import Privacy

__all__ = ["Privacy"]
