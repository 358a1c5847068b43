"""Configurations by the names of flags."""

from fedveil.runs.settings import configure


def config_of(**values):
    """A configuration with these values, and defaults for all others."""
    return configure(values)
