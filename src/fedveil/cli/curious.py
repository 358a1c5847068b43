"""`fedveil attack` and `fedveil audit`."""

import argparse
import json
from pathlib import Path
from typing import Any

from fedveil.cli.flags import add_config, add_values, flag_of, read_without_defence
from fedveil.cli.show import Cells, print_shown, print_table
from fedveil.data import available
from fedveil.errors import BadArgument
from fedveil.runs.config import CHOICES, Config, configure, kinds
from fedveil.runs.folder import read_config as read_folder
from fedveil.studies.attack import defences_of
from fedveil.studies.attack import run_attack as attack
from fedveil.studies.attacks import ATTACKS
from fedveil.studies.audit.harden import harden
from fedveil.studies.audit.run import AUDIT, SUITE


def add_attack(commands: Any) -> None:
    """`fedveil attack NAME`: the flags of `fedveil train`, the attack's own, several defences."""
    attacks = commands.add_parser("attack", help="what a curious participant learns").add_subparsers(
        dest="attack", required=True
    )
    for experiment in ATTACKS.values():
        command = attacks.add_parser(experiment.name, allow_abbrev=False, help=experiment.summary)
        add_config(command, without=["defence"])
        command.add_argument("--defence", help=f"all (default), or some of {','.join(CHOICES['defence'])}")
        command.add_argument(
            "--run", type=Path, dest="folder", help="attack the federation that a run left in a folder"
        )
        add_values(command.add_argument_group("the attack"), kinds(experiment.settings))
        command.add_argument("--out", type=Path, help="folder of the results; a stopped attack goes on there")
        command.add_argument("--workers", type=int, help="processes side by side (default: one a core)")
        command.add_argument("--json", action="store_true", help="print the table for machines")
        command.set_defaults(run=run_attack)


def run_attack(options: argparse.Namespace) -> None:
    """Attack, and print the table."""
    experiment = ATTACKS[options.attack]
    where = f"fedveil attack {experiment.name}"
    defaults = dict(experiment.defaults)
    if options.folder and options.defence:
        raise BadArgument(where, "a run has its own defence", "leave out --defence, or --run")
    config = read_folder(options.folder) if options.folder else read_without_defence(options, where, defaults)
    asked = {name: value for name in kinds(experiment.settings) if (value := getattr(options, name)) is not None}
    settings = experiment.settings(**asked)
    defences = [config.defence] if options.folder else defences_of(options.defence or "all")
    folder = options.out or (options.folder or Path("runs")) / f"attack-{experiment.name}"
    source = f"--run {options.folder}"
    if not options.folder:
        changed = config.changes() | {name: getattr(config, name) for name in defaults}
        flags = [flag_of(name, value) for name, value in changed.items() if value is not None and name != "defence"]
        source = f"{' '.join(flags)} --defence {','.join(defences)}"
    own = " ".join(flag_of(name, value) for name, value in asked.items())
    command = " ".join(f"{where} {source} {own} --out {folder}".split())
    with Cells() as cells:
        shown = attack(
            experiment,
            config,
            settings,
            defences,
            folder,
            run=options.folder,
            workers=options.workers,
            show=cells.show,
            command=command,
        )
    if options.json:
        print(json.dumps([dict(zip(shown.header, row, strict=True)) for row in shown.rows]))
        return
    print_table(shown.header, shown.rows)
    print(f"\n{shown.note}\nreport: {folder / 'report.html'}\nrepeat: {command}")


def add_audit(commands: Any) -> None:
    """`fedveil audit`: what a participant learns, and what hardens the veil."""
    command = commands.add_parser("audit", allow_abbrev=False, help="what a participant that thinks learns")
    command.add_argument("file", nargs="?", type=Path, help="a run's folder, or run.toml; flags override it")
    add_values(command, {name: kind for name, kind in kinds().items() if name != "defence"})
    command.add_argument("--defence", help=f"all (default), or some of {','.join(CHOICES['defence'])}")
    command.add_argument("--trials", type=int, default=20, help="records that the attacker tries to rebuild")
    command.add_argument("--harden", action="store_true", help="measure what hardens the veil instead")
    command.add_argument("--seeds", type=int, default=5, help="runs of each setting with --harden (default 5)")
    command.add_argument("--out", type=Path, help="folder of the results; a stopped audit goes on there")
    command.add_argument("--workers", type=int, help="processes side by side (default: one a core)")
    command.set_defaults(run=run_audit)


def run_audit(options: argparse.Namespace) -> None:
    """Audit a run, a configuration, or, without any, the standard suite."""
    folder = options.out or Path("runs/hardening" if options.harden else "runs/audit")
    if options.harden:
        command = f"fedveil audit --harden --seeds {options.seeds} --trials {options.trials} --out {folder}"
        with Cells() as cells:
            rest = {"workers": options.workers, "show": cells.show, "command": command}
            shown = harden(folder, seeds=options.seeds, trials=options.trials, **rest)
        print_shown(shown, folder, command)
        return
    run = options.file if options.file and options.file.is_dir() else None
    if run and options.defence:
        raise BadArgument("fedveil audit", "a run has its own defence", "leave out --defence, or the folder")
    if run or options.file or any(getattr(options, name, None) is not None for name in kinds() if name != "defence"):
        config = read_folder(run) if run else read_without_defence(options, "fedveil audit", AUDIT.defaults)
        audit_one(options, config, run, options.out or (run / "audit" if run else folder))
        return
    for name, values in SUITE.items():
        config = configure(dict(values))
        print(f"{name}\n")
        if config.data in missing_data():
            print(f"left out: fedveil data get {config.data}, or set FEDVEIL_DATA\n")
            continue
        audit_one(options, config, None, folder / name.replace(", ", "-").replace(" ", "-"))
        print()


def missing_data() -> set[str]:
    """Data sets that are not on this machine."""
    return {entry.name for entry in available() if entry.state == "missing"}


def audit_one(options: argparse.Namespace, config: Config, run: Path | None, folder: Path) -> None:
    """Audit one federation under its defences, and print table and verdict."""
    defences = [config.defence] if run else defences_of(options.defence or "all")
    changed = config.changes() | {name: getattr(config, name) for name in ("data", *AUDIT.defaults)}
    flags = [flag_of(name, value) for name, value in changed.items() if name != "defence"]
    source = str(run) if run else f"{' '.join(flags)} --defence {','.join(defences)}"
    command = f"fedveil audit {source} --trials {options.trials} --out {folder}"
    with Cells() as cells:
        shown = attack(
            AUDIT,
            config,
            AUDIT.settings(options.trials),
            defences,
            folder,
            run=run,
            workers=options.workers,
            show=cells.show,
            command=command,
        )
    print_shown(shown, folder, command)
