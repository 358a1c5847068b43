"""Attacks by a participant. They see what a client was sent and the client's own records, nothing else."""

from fedveil.attacks.sight import Round, Sight

__all__ = ["Round", "Sight"]
