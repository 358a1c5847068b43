"""The table of commands. It imports nothing that a command needs."""

COMMANDS = {
    "inspect": ("training:inspect", "show which layers of a model can be perturbed", "my_package:net --input 3,32,32"),
    "train": (
        "training:TrainCommand",
        "train a federation, from flags or a TOML file",
        "--data digits --epochs 5 --out runs/a",
    ),
    "compare": (
        "studies:CompareCommand",
        "compare defences on one federation",
        "--defences plain,veil --seeds 3",
    ),
    "attack": ("studies:AttackCommand", "measure what a curious participant learns", "membership --defence plain,veil"),
    "audit": (
        "studies:AuditCommand",
        "measure what attackers learn under each defence",
        "runs/a",
    ),
    "reproduce": ("studies:reproduce", "compute the paper's tables and figures beside its values", "all --scale cpu"),
    "data": ("training:data", "list data sets, or download one", "get bank"),
    "demo": ("studies:demo", "train digits with five clients, plain and veiled, and compare", "--out runs/demo"),
    "keys": ("keys:keys", "make or show a member's signing key, for secure aggregation", "new alice --out keys"),
    "flare-kit": ("flare:flare_kit", "prepare a startup kit of NVIDIA FLARE", "runs/kits/bank/prod_00/site-1"),
    "schema": ("training:schema", "print the JSON schema of run.toml, for editors", "> run.schema.json"),
    "completion": ("flags:completion", "print the completion script of a shell", "bash > ~/.fedveil-completion"),
}
"""The module and the function or class of each command, a summary, and the rest of an example."""

USAGE = """usage: fedveil COMMAND [FLAGS]
       fedveil --version

Train one model across organisations on a perturbed copy, and measure what attackers learn.

commands:
{commands}

Example: fedveil train --data digits --defence veil --epochs 5

`fedveil COMMAND --help` lists the flags of a command with their defaults, `--help-all` the rest.
`fedveil completion bash` (or zsh, fish) prints the completion script of your shell."""


def usage() -> str:
    """Return the help of `fedveil`."""
    return USAGE.format(commands="\n".join(f"  {name:<13}{summary}" for name, (_, summary, _) in COMMANDS.items()))
