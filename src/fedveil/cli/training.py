"""The commands `fedveil train`, `data` and `schema`."""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from tyro.conf import Positional, arg

from fedveil.cli.parser import FederationCommand, Json, Switch, parse_command
from fedveil.cli.show import hide_progress, print_progress, print_table, round_callback
from fedveil.errors import BadArgument
from fedveil.plain_json import to_json
from fedveil.runs.choices import applicable_values, check_names
from fedveil.runs.settings import Config, format_flags, has_privacy
from fedveil.signals import INTERRUPTED, TERMINATED, Termination, catch_sigterm, kill_on_interrupt

MAX_CLASSES = 20  # maximum number of classes in the printed summary
VEIL_PARTS = (
    "scaled",
    "signed",
    "moved",
    "bare",
    "revealed",
)  # kinds of parameter values that the coverage of a veil counts
OUT_HELP = "folder for the run; by default runs/DATA-MODEL-DEFENCE-SEED, numbered if that folder already contains a run"
NAME_HELP, TO_HELP = "data set to download", "folder for the download; by default FEDVEIL_DATA or the cache"
QUIET_HELP = "do not show progress"
RESUME_HELP = "continue the run in --out (by default, the latest); only --epochs may change"


@dataclass(frozen=True)
class TrainCommand(FederationCommand):
    """`fedveil train`: train a federation."""

    out: Annotated[Path | None, arg(help=OUT_HELP, help_behavior_hint="")] = None
    resume: Annotated[Switch, arg(help=RESUME_HELP)] = False
    quiet: Annotated[Switch, arg(help=QUIET_HELP)] = False
    as_json: Json = False

    @classmethod
    def parse(cls, prog: str, words: Sequence[str], description: str = "") -> Self:
        """Parse the flags of the command; to resume a run, flags override the configuration in its folder."""
        result = parse_command(cls(), prog, words, description)
        if result.file and result.file.is_dir():
            name = f"{result.file / 'config.json'}"
            fix = f"use {name} to repeat the run in it, or {name} --out {result.file} --resume to continue it"
            raise BadArgument(str(result.file), "this is a folder, not a file", fix)
        check_names(result.config)  # report errors before torch is imported
        with kill_on_interrupt():
            import fedveil.runs.folder  # noqa: F401
        if result.resume and not result.file:
            folder = result.out or default_folder(result.config, resume=True)
            configuration = folder / "config.json"
            if configuration.is_file():
                result = replace(parse_command(cls(), prog, [str(configuration), *words], description), out=folder)
        return result

    def run(self) -> None:
        """Train and show progress on stderr; if training is stopped, print the command that resumes it."""
        folder = self.out or default_folder(self.config, self.resume)
        try:
            with catch_sigterm():
                self._train(folder)
        except KeyboardInterrupt as end:
            from fedveil.federation.run_folder import describe_stop

            print(f"\nfedveil: stopped; {describe_stop(folder)}", file=sys.stderr)
            raise SystemExit(TERMINATED if isinstance(end, Termination) else INTERRUPTED) from end

    def _train(self, folder: Path) -> None:
        from fedveil.runs.build import choose_settings, load_data
        from fedveil.runs.folder import contains_run, train

        if self.resume and not contains_run(folder):
            raise BadArgument(str(folder), "there is no run to resume", "leave out --resume, or choose another --out")
        data = load_data(self.config)
        for note in data.notes:
            print(f"{data.name}: {note}", file=sys.stderr)
        config = choose_settings(self.config, len(data.train.targets))
        if changes := applicable_values(config).items() - applicable_values(self.config).items():
            flags = format_flags({key: value for key, value in config.flat().items() if key in dict(changes)})
            reason = "privacy, given the number of records" if has_privacy(config) else "local training"
            print(f"chosen for {reason}: {flags}", file=sys.stderr)
        with hide_progress() if self.quiet else print_progress() as show:
            on_round = round_callback(show, config.training.epochs, config.training.monitor)
            summary = train(config, folder, resume=self.resume, on_round=on_round, data=data)
        if self.as_json:
            print(to_json(summary.to_dict()))
            return
        values = summary.values() | {"report": str(folder / "report.html")}
        lines = label_values(values)
        width = max(14, *map(len, lines))
        for name, value in lines.items():
            print(f"{name:<{width}} {value:.6g}" if isinstance(value, float) else f"{name:<{width}} {value}")
        rows = [
            [metrics.name, metrics.precision, metrics.recall, metrics.f1, metrics.records]
            for metrics in summary.by_class
        ]
        if 0 < len(rows) <= MAX_CLASSES:
            cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
            print_table([["\nclass", "precision", "recall", "f1", "records"], *cells], 1)


def label_values(summary: Mapping[str, int | float | str | None]) -> dict[str, int | float | str | None]:
    """Return the values of a summary with readable labels, and a veil's coverage on one line."""
    coverage = ", ".join(f"{name} {100 * float(summary[name] or 0):.1f} %" for name in VEIL_PARTS if name in summary)
    metric = str(summary.get("best_on", "")).partition(" ")[0]
    labels = {name: name.replace("_", " ") for name in summary if name.startswith(("best", "balanced", "validation"))}
    labels |= {"best": f"best {metric}".replace("_", " "), "best_on": "best by", "largest_error": "gradient error"}
    if "rmse" in summary:
        labels |= {"mse": "mse, scaled", "rmse": "rmse, unscaled", "mae": "mae, unscaled"}
        labels |= {"best": "best, scaled"} if metric.endswith(("mse", "loss")) else {}
    result: dict[str, int | float | str | None] = {}
    for name, value in summary.items():
        if name == VEIL_PARTS[0]:
            result["veil"] = coverage
        elif name not in (*VEIL_PARTS, "schema"):
            result[labels.get(name, name)] = value
    return result


def default_folder(config: Config, resume: bool) -> Path:
    """Return the first folder for the configuration that contains no run or, to resume, the last that contains one."""
    from fedveil.runs.folder import contains_run

    base_folder = Path("runs") / f"{config.title}-{config.training.seed}"
    folder = last_run = base_folder
    for number in itertools.count(2):
        if not contains_run(folder):
            break
        last_run, folder = folder, base_folder.with_name(f"{base_folder.name}-{number}")
    return last_run if resume else folder


def data(
    action: Annotated[Literal["list", "get"], arg(help="list the data sets, or download one")],
    name: Annotated[str | None, Positional, arg(metavar="[NAME]", help=NAME_HELP, help_behavior_hint="")] = None,
    to: Annotated[Path | None, arg(help=TO_HELP, help_behavior_hint="")] = None,
) -> None:
    """List data sets, or download one."""
    from fedveil.data import get, list_datasets

    if action == "list":
        for entry in list_datasets():
            location = f"  [{entry.where}]" if entry.where else ""
            print(f"{entry.name:<10} {entry.state:<9} {entry.description}{location}")
        return
    if name is None:
        raise BadArgument("fedveil data get", "no data set is specified", "run fedveil data list to see their names")
    with print_progress() as show:
        print(get(name, to, partial(show, name)))


def schema() -> None:
    """Print the JSON schema of run.toml."""
    print(json.dumps(Config.model_json_schema(), indent=2))
