"""The tables of commands and attacks. Importing this module does not import the commands' dependencies."""

import importlib
from typing import TYPE_CHECKING, Any

from fedveil.checks import check_choice
from fedveil.errors import BadArgument
from fedveil.lookup import import_object, list_installed

if TYPE_CHECKING:
    from fedveil.studies.attack import AttackStudy

COMMANDS = {
    "inspect": ("inspection:inspect", "show which layers of a model can be perturbed", "my_nets:net --input 3,32,32"),
    "train": ("training:TrainCommand", "train a federation from flags or a TOML file", "--epochs 5 --out runs/a"),
    "predict": ("prediction:predict", "make predictions for new records with the model of a run", "runs/a new.csv"),
    "export": (
        "prediction:export",
        "export the model of a run for use without Fedveil",
        "runs/a --format onnx",
    ),
    "status": ("status:status", "print the progress, clients and privacy budget of a run", "runs/a"),
    "compare": ("studies:CompareCommand", "compare defences on one federation", "--defences plain,veil --seeds 3"),
    "attack": ("studies:AttackCommand", "measure what a curious participant learns", "membership --defence plain,veil"),
    "audit": ("studies:AuditCommand", "measure what attackers learn under each defence", "runs/a"),
    "reproduce": ("studies:reproduce", "recompute the paper's tables and figures", "all --scale cpu"),
    "data": ("training:data", "list data sets, or download one", "get bank"),
    "demo": ("studies:demo", "train a plain and a veiled model on digits, and compare them", "--out runs/demo"),
    "keys": ("deployment:keys", "manage signing keys and policies for secure aggregation", "new alice --out keys"),
    "flare-kit": ("deployment:flare_kit", "prepare an NVIDIA FLARE startup kit", "runs/kits/bank/prod_00/site-1"),
    "schema": ("training:schema", "print the JSON schema of run.toml, for editors", "> run.schema.json"),
    "help": ("topics:print_help", "print a page of the documentation, or list the pages", "privacy"),
    "completion": ("parser:completion", "print a shell completion script", "bash > ~/.fedveil-completion"),
}
"""For each command, its module and function or class, a summary, and example arguments."""

USAGE = """usage: fedveil COMMAND [FLAGS]
       fedveil --version

Train one model across organisations on a perturbed copy, and measure what attackers learn.

commands:
{commands}

Example: fedveil train --data digits --defence veil --epochs 5

`fedveil COMMAND --help` lists a command's flags with their defaults; `--help-all` lists all flags.
`fedveil help` lists the pages of the documentation, and `fedveil help TOPIC` prints one.
`fedveil completion bash` (or zsh, fish) prints a completion script for your shell."""

AUDIT = "fedveil.studies.audit.run:AUDIT"
ENTRY_POINT_GROUP = "fedveil.attacks"
ATTACKS = {
    "gradients": ("fedveil.studies.gradients.run:GRADIENTS", "reconstruct images from gradients (DLG and others)"),
    "inversion": ("fedveil.studies.inversion.run:INVERSION", "reconstruct typical images of the classes (GMI)"),
    "membership": ("fedveil.studies.membership.run:MEMBERSHIP", "infer which records the other clients trained on"),
    "poisoning": (
        "fedveil.studies.poisoning:POISONING",
        "measure the effect of hostile clients, with and without limits",
    ),
    "server": ("fedveil.studies.gradients.server:SERVER", "measure what a curious server learns from updates and sums"),
}
"""For each attack, its study and a summary."""


def usage() -> str:
    """Return the help text of `fedveil`."""
    return USAGE.format(commands="\n".join(f"  {name:<13}{summary}" for name, (_, summary, _) in COMMANDS.items()))


def find_command(name: str) -> Any:
    """Return the object that runs a command: a function whose parameters are flags, or a `FederationCommand`."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"fedveil.cli.{module}"), attribute)


def attack_names() -> dict[str, str]:
    """Return the attacks in this library and in installed packages, each with a summary."""
    installed = {name: f"{spec}, from an installed package" for name, spec in list_installed(ENTRY_POINT_GROUP).items()}
    return installed | {name: summary for name, (_, summary) in ATTACKS.items()}


def find_attack(name: str) -> "AttackStudy[Any, Any]":
    """Return an attack, given its name, the name of its entry point, or its path `package.module:NAME`."""
    from fedveil.studies.attack import AttackStudy

    spec = name
    if ":" not in name:
        check_choice("fedveil attack", "attack", name, attack_names())
        spec = ATTACKS[name][0] if name in ATTACKS else list_installed(ENTRY_POINT_GROUP)[name]
    result = import_object(spec, "an attack", "my_package.attacks:GUESS")
    if isinstance(result, type) and issubclass(result, AttackStudy):
        result = result()
    if not isinstance(result, AttackStudy):
        fix = "use an instance or a subclass of fedveil.studies.attack.AttackStudy"
        raise BadArgument(spec, f"expected an attack, got {type(result).__name__}", fix)
    return result
