"""Flags of a command line, and the configuration that they make."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.runs.config import CHOICES, Config, configure, kinds, read_toml

HELP = {
    "data": "a data set (fedveil data list), or package.module:factory, which returns fedveil.data.Data or "
    "((inputs, targets), (inputs, targets)) for training and test",
    "min_coverage": "veil: refuse a model of which less than this share of the values can be covered, 0 to 1",
    "model": "mlp, cnn, lenet, resnet20, densenet ..., or package.module:factory",
}


def add_config(command: Any, without: Sequence[str] = ()) -> None:
    """A TOML file, and a flag for each value of a configuration."""
    command.add_argument("file", nargs="?", type=Path, help="run.toml; flags override it")
    add_values(command, {name: kind for name, kind in kinds().items() if name not in without})


def add_values(command: Any, values: Mapping[str, type]) -> None:
    """A flag for each value."""
    for name, kind in values.items():
        flag, options = "--" + name.replace("_", "-"), {"default": None, "dest": name}
        if kind is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            command.add_argument(flag, type=kind, choices=CHOICES.get(name), help=HELP.get(name), **options)


def read_config(options: argparse.Namespace, where: str, defaults: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a command line."""
    values = dict(defaults or {}) | (read_toml(options.file) if options.file else {})
    values |= {name: value for name in kinds() if (value := getattr(options, name, None)) is not None}
    return configure(values, str(options.file or where))


def read_without_defence(options: argparse.Namespace, where: str, defaults: Mapping[str, Any]) -> Config:
    """The configuration, in which each defence is put later; sizes for one data set mean nothing to another."""
    data = options.data or (read_toml(options.file) if options.file else {}).get("data", defaults.get("data"))
    if data != defaults.get("data"):
        defaults = {name: value for name, value in defaults.items() if name not in ("train_size", "test_size")}
    named, options.defence = options.defence, None
    config = read_config(options, where, defaults)
    options.defence = named
    return config


def flag_of(name: str, value: object) -> str:
    """A value as a flag."""
    flag = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}"
