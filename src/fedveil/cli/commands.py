"""The commands: where each is, what it does, an example. Nothing here imports what a command needs."""

COMMANDS = {
    "inspect": ("training:inspect", "show which layers of a model can be masked", "my_package:net --input 3,32,32"),
    "train": ("training:Train", "train together, from flags or a TOML file", "--data digits --epochs 5 --out runs/a"),
    "compare": ("studies:Compare", "compare defences on one federation", "--defences plain,baseline,veil --seeds 3"),
    "attack": ("studies:Attack", "measure what a curious participant learns", "membership --defence plain,veil"),
    "audit": ("studies:Audit", "measure what published and adaptive attackers learn under each defence", "runs/a"),
    "reproduce": ("studies:reproduce", "the paper's tables and figures, its values beside ours", "all --scale cpu"),
    "data": ("training:data", "list data sets, or download one", "get bank"),
    "demo": ("studies:demo", "train digits with five clients, plain and veiled, and compare", "--out runs/demo"),
    "keys": ("keys:keys", "make or show a member's signing key, for secure aggregation", "new alice --out keys"),
    "flare-kit": ("flare:flare_kit", "prepare a startup kit of NVIDIA FLARE", "runs/kits/bank/prod_00/site-1"),
    "schema": ("training:schema", "print the JSON schema of run.toml, for editors", "> run.schema.json"),
    "completion": ("flags:completion", "print the completion script of a shell", "bash > ~/.fedveil-completion"),
}
"""Of each command the module and the function or class, a summary, and the rest of an example."""

USAGE = """usage: fedveil COMMAND [FLAGS]
       fedveil --version

Federated learning on a covered model, and attacks that measure what it hides.

commands:
{commands}

Example: fedveil train --data digits --defence veil --epochs 5

`fedveil COMMAND --help` lists the flags of a command with their defaults.
`fedveil completion bash` (or zsh, fish) prints what completes commands and flags in your shell."""


def usage() -> str:
    """The help of `fedveil`."""
    return USAGE.format(commands="\n".join(f"  {name:<13}{summary}" for name, (_, summary, _) in COMMANDS.items()))
