"""`fedveil attack`, `audit`, `compare`, `reproduce` and `demo`: studies, which can be interrupted and resumed."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from tyro.conf import Suppress, arg

from fedveil.checks import check_count
from fedveil.cli.commands import AUDIT, attack_names, find_attack
from fedveil.cli.parser import HELP_FLAGS, FederationCommand, Json, Switch, parse_command
from fedveil.cli.show import print_progress, print_result
from fedveil.defences import registry
from fedveil.errors import BadArgument
from fedveil.files import lock_folder
from fedveil.runs.settings import CODE_KEYS, SECTION_OF, Config, Value, configure, format_flags

if TYPE_CHECKING:
    from fedveil.studies.attack import AttackStudy
    from fedveil.studies.paper.plan import ExhibitPlan
    from fedveil.studies.study import Presentation, Study

S = TypeVar("S")
DEFENCES_HELP = (
    "all, or a comma-separated list of plain, veil, ppdl, dbcl, spn, installed defences and package.module:Class"
)
COMPARE_HELP = "comma-separated list of defences; baseline is plain training with one additional rounding error"
EXHIBITS_HELP = "all, or some of table1, table2, fig3, table3, table4, fig4, fig5"
SCALES_HELP = (
    "quick: takes minutes, on built-in data; cpu: up to two hours per table on two cores; paper: as published, on a GPU"
)
RUN_HELP = "attack the run in this folder"
MEASURE_HELP = (
    "repeat a private run with canaries, and bound its true epsilon; --epsilon without a number does the same"
)
MODEL_AUDIT_FLAGS = ("--weights", "--members", "--others")  # any of these selects the audit of a single model
MODEL_AUDIT_HINT = """To audit any trained model with its training records and other records from the same source:
  fedveil audit --model my_package:Net --weights final.pt --members in.csv --others out.csv"""
OUT_HELP = "folder for the results, from which an interrupted command resumes; by default a folder in runs"
Out = Annotated[Path | None, arg(help=OUT_HELP, help_behavior_hint="")]
WORKERS_HELP = "number of parallel processes; by default one per core"
Workers = Annotated[int | None, arg(help=WORKERS_HELP, help_behavior_hint="")]


def run_study(study: "Study[S, Any]", request: S, folder: Path, command: str, workers: Workers, as_json: bool) -> None:
    """Compute missing results, write the page and print the table."""
    from fedveil.studies.basis import COMPUTED_AGAIN
    from fedveil.studies.study import gather, publish

    if workers is not None:
        check_count("fedveil", "--workers", workers)
    command = f"{command} {format_flags({'out': str(folder)})}"
    with lock_folder(folder):
        with print_progress(COMPUTED_AGAIN) as show:
            results = gather(study, request, folder, workers=workers, show=show)
        presentation = publish(study, request, results, folder, command)
    verdict = f"\n{textwrap.fill(presentation.verdict, 110)}\n"
    print_result(presentation, verdict, f"report: {folder / 'report.html'}", f"repeat: {command}", as_json=as_json)


@dataclass(frozen=True)
class AttackCommand(FederationCommand):
    """`fedveil attack NAME`: attack one federation under several defences."""

    prefix: ClassVar[str] = "attack-"
    defence_flag: ClassVar[str] = "defence"
    spec: Annotated[str, Suppress] = ""  # name of the attack
    where: Annotated[str, Suppress] = "fedveil attack"
    defence: Annotated[str, arg(help=DEFENCES_HELP)] = "all"
    attack: Annotated[object, arg(name="")] = None  # options of the study
    run_folder: Annotated[Path | None, arg(name="run", help=RUN_HELP, help_behavior_hint="")] = None
    out: Out = None
    workers: Workers = None
    as_json: Json = False

    @classmethod
    def for_attack(cls, name: str, where: str = "fedveil attack") -> Self:
        """Return the command with the flags and defaults of an attack."""
        study = find_attack(name)
        defence = str(study.defaults.get("defence", "all"))
        return cls(spec=name, where=where, defence=defence, attack=study.options())

    @classmethod
    def variants(cls) -> dict[str, FederationCommand]:
        """Return one command per attack."""
        return {name: cls.for_attack(name) for name in attack_names()}

    @classmethod
    def parse(cls, prog: str, words: Sequence[str], description: str = "") -> Self:
        """Parse the flags of the named attack; if help is requested without a name, list the attacks."""
        if words and words[0] in HELP_FLAGS:
            lines = [f"  {name:<12}{summary}" for name, summary in attack_names().items()]
            print(f"usage: {prog} NAME [FILE] [FLAGS]\n\n{description}\n\nattacks:", *lines, sep="\n")
            raise SystemExit(0)
        start = cls.for_attack(name := words[0] if words else "", f"{prog} {name}")
        return parse_command(start, start.where, words[1:], f"{description}\n\n{name}: {start.study.summary}")

    @property
    def study(self) -> "AttackStudy[Any, Any]":
        """The study of the attack."""
        return find_attack(self.spec)

    @property
    def defaults(self) -> Mapping[str, Value]:
        """The configuration values whose defaults differ for this attack."""
        return {key: value for key, value in self.study.defaults.items() if key != "defence"}

    @property
    def defences(self) -> tuple[str, ...]:
        """Names of the defences."""
        names = [record.name for record in registry.BUILT_IN]
        return tuple(names if self.defence == "all" else self.defence.split(","))

    def run(self) -> None:
        """Attack the federation of a run or of a configuration."""
        run = self.run_folder or (self.file if self.file and self.file.is_dir() else None)
        folder = self.out or (run or Path("runs")) / f"{self.prefix}{self.study.name}"
        self.measure(self.read_run(run) if run else self.config, folder, run)

    def read_run(self, run: Path) -> Config:
        """Read the configuration of a run; refuse code that is neither trusted nor named on the command line."""
        from fedveil.runs.folder import read_config

        values = {**self.config.flat(), "defence": self.defence}
        code_values = {key: value for key, value in values.items() if key in CODE_KEYS and key in self.used_flags}
        if ":" not in str(code_values.get("defence", ":")):
            raise BadArgument(self.where, "the defence of a run cannot be changed", f"leave out --defence, or {run}")
        config = read_config(run, trust_code=self.trust_code, named_keys=code_values)
        for key, value in code_values.items():
            if value != (existing_value := config.flat()[key]):
                raise BadArgument(
                    self.where, f"the existing run has {key} = {existing_value!r}, not {value!r}", f"leave out --{key}"
                )
        return config

    def measure(self, config: Config, folder: Path, run: Path | None = None) -> None:
        """Run the attack, write its page and print the table."""
        from fedveil.runs.build import choose_loss
        from fedveil.studies.attack import AttackRequest, check_defences, plain_values
        from fedveil.studies.federations import describe_run

        config = choose_loss(config)
        defences = (config.defence.name,) if run else self.defences
        check_defences(defences, registry.names(), "--defence")
        defaults = plain_values(self.study.options())
        if run:
            values: dict[str, Value] = {"run": str(run)} | ({"trust_code": True} if self.trust_code else {})
            values |= {key: config.flat()[key] for key in CODE_KEYS if key in self.used_flags}
        else:
            keys = {"data", *config.changed_values(), *self.defaults} - {"defence"}
            values = {name: value for name, value in config.flat().items() if name in keys}
            values |= {"defence": ",".join(defences)}
        values |= {name: value for name, value in plain_values(self.attack).items() if value != defaults[name]}
        notes = tuple(describe_run(config, run)) if run else ()
        request = AttackRequest(config.changed(defence=defences[0]), defences, self.attack, run, notes=notes)
        run_study(self.study, request, folder, f"{self.where} {format_flags(values)}", self.workers, self.as_json)


def _is_repeatable(run: Path) -> bool:
    from fedveil.federation.results import is_repeatable

    return is_repeatable(run)


@dataclass(frozen=True)
class AuditCommand(AttackCommand):
    """`fedveil audit`: audit a configuration, a run's folder or the standard suite."""

    prefix: ClassVar[str] = ""
    harden: Annotated[Switch, arg(help="instead of an audit, measure which settings harden the veil")] = False
    seeds: Annotated[int, arg(help="for --harden: number of runs per setting")] = 5
    measure_epsilon: Annotated[Switch, arg(help=MEASURE_HELP)] = False
    model_words: Annotated[tuple[str, ...], Suppress] = ()  # the command line, for the audit of a single model
    description: Annotated[str, Suppress] = ""

    @classmethod
    def variants(cls) -> dict[str, FederationCommand]:
        """Return the command with the audit's options."""
        return {"": cls.for_attack(AUDIT, "fedveil audit")}

    @classmethod
    def parse(cls, prog: str, words: Sequence[str], description: str = "") -> Self:
        """Parse the flags of the command; --epsilon without a number means --measure-epsilon.

        The flags of the audit of a single model are parsed later, by `fedveil.cli.model_audit`.
        """
        if any(word.partition("=")[0] in MODEL_AUDIT_FLAGS for word in words):
            return replace(cls.for_attack(AUDIT, prog), model_words=tuple(words), description=description)
        description = f"{description}\n\n{MODEL_AUDIT_HINT}"
        flag_words = [
            "--measure-epsilon" if word == "--epsilon" and not next_word[:1].isdigit() else word
            for word, next_word in pairwise([*words, ""])
        ]
        return parse_command(cls.for_attack(AUDIT, prog), prog, flag_words, description)

    @property
    def is_suite(self) -> bool:
        """Whether the command names no file, no run and no configuration value except the defence."""
        return not (self.file or self.run_folder or set(self.used_flags) & (SECTION_OF.keys() - {"defence"}))

    def run(self) -> None:
        """Audit a run, a configuration or the standard suite, or measure epsilon or settings that harden the veil."""
        if self.model_words:
            from fedveil.cli.model_audit import run_model_audit

            run_model_audit(self.where, self.model_words, self.description)
        elif self.measure_epsilon:
            self.measure_privacy()
        elif self.harden:
            self.measure_hardening()
        elif self.is_suite:
            self.audit_suite(self.out or Path("runs/audit"))
        elif (run := self.run_folder or self.file) and run.is_dir() and not _is_repeatable(run):
            self.audit_from_description(run)
        else:
            super().run()

    def audit_from_description(self, run: Path) -> None:
        """Audit a run from Python, Flower or FLARE, with the given records or with random stand-ins."""
        from fedveil.studies.attack import plain_values
        from fedveil.studies.audit.call import audit_from_description
        from fedveil.studies.audit.folder import parts_from_flags
        from fedveil.studies.audit.run import AuditOptions

        options = self.attack
        assert isinstance(options, AuditOptions)
        defence = {"defence": self.defence} if "defence" in self.used_flags else {}
        config, folder = self.config.changed(**defence), self.out or run / "audit"
        all_values = {**config.flat(), "trust_code": self.trust_code, **plain_values(options)}
        values = {"run": str(run)} | {key: value for key, value in all_values.items() if key in self.used_flags}
        command = f"{self.where} {format_flags(values)}"
        with lock_folder(folder):
            with print_progress() as show:
                parts = parts_from_flags(run, config, self.used_flags, self.trust_code)
                report = audit_from_description(
                    run, parts, options, lambda fraction, step: show("audit", fraction, step), command
                )
            page = report.page(folder)
        last_lines = f"\n{textwrap.fill(report.presentation.verdict, 110)}\n", f"report: {page}", f"repeat: {command}"
        print_result(report.presentation, *last_lines, as_json=self.as_json)

    def measure_privacy(self) -> None:
        """Measure the epsilon of a private run or configuration."""
        from fedveil.runs.build import choose_loss
        from fedveil.studies.measured_epsilon import EPSILON

        run = self.run_folder or (self.file if self.file and self.file.is_dir() else None)
        config = choose_loss(self.read_run(run) if run else self.config.changed(defence=self.defences[0]))
        values = {"run": str(run)} if run else config.changed_values()
        folder = self.out or (run or Path("runs")) / "epsilon"
        run_study(EPSILON, config, folder, f"{self.where} --epsilon {format_flags(values)}", 1, self.as_json)

    def measure_hardening(self) -> None:
        """Measure which settings harden the veil, in the federation that the flags describe."""
        from fedveil.studies.attack import plain_values
        from fedveil.studies.audit.harden import HARDEN, Hardening, base_values, default_options

        if self.run_folder or self.file:
            raise BadArgument(self.where, "--harden trains its own federations", "pass flags instead of a run")
        values, attack_values = {**self.config.flat(), "defence": self.defence}, plain_values(self.attack)
        flag_values = {name: values[name] for name in self.used_flags if name in SECTION_OF}
        options: dict[str, Any] = {name: attack_values[name] for name in self.used_flags if name in attack_values}
        base, seeds = base_values(flag_values), check_count(self.where, "--seeds", self.seeds)
        request = Hardening(base, seeds, replace(default_options(base), **options))
        folder = self.out or Path("runs/hardening")
        command = f"{self.where} --harden {format_flags(flag_values | {'seeds': seeds} | options)}"
        run_study(HARDEN, request, folder, command, self.workers, self.as_json)

    def audit_suite(self, folder: Path) -> None:
        """Audit the federations in the standard suite whose data sets are available."""
        from fedveil.data import list_datasets
        from fedveil.studies.audit.run import SUITE

        missing = {entry.name for entry in list_datasets() if entry.state == "missing"}
        for name, values in SUITE.items():
            config = configure(values)
            print(f"{name}\n", file=sys.stderr if self.as_json else sys.stdout)
            if config.data.name in missing:
                print(f"skipped: run fedveil data get {config.data.name}, or set FEDVEIL_DATA\n", file=sys.stderr)
            else:
                self.measure(config, folder / name.replace(", ", "-").replace(" ", "-"))


@dataclass(frozen=True)
class CompareCommand(FederationCommand):
    """`fedveil compare`: train a federation under several defences."""

    defence_flag: ClassVar[str] = "defences"
    names: Annotated[str, arg(name="defences", help=COMPARE_HELP)] = "plain,baseline,veil,ppdl,dbcl,spn"
    seeds: Annotated[int, arg(help="number of runs per defence; their seeds start at --seed")] = 3
    out: Out = None
    workers: Workers = None
    as_json: Json = False

    @property
    def defences(self) -> tuple[str, ...]:
        """Names of the defences."""
        return tuple(name for name in self.names.split(",") if name != "baseline") or ("plain",)

    def run(self) -> None:
        """Train the missing runs and print the table."""
        from fedveil.runs.build import choose_loss
        from fedveil.studies.compare import COMPARE, CompareRequest

        config = choose_loss(self.config)
        request = CompareRequest(config, tuple(self.names.split(",")), self.seeds)
        title = f"compare-{config.data.name}-{config.model.name}".replace(":", ".")
        values = config.changed_values() | {"defences": self.names, "seeds": self.seeds}
        command, folder = f"fedveil compare {format_flags(values)}", self.out or Path("runs") / title
        run_study(COMPARE, request, folder, command, self.workers, self.as_json)


def reproduce(
    names: Annotated[
        tuple[str, ...], arg(metavar="NAME [NAME ...]", help=EXHIBITS_HELP, help_behavior_hint="(required)")
    ],
    scale: Annotated[Literal["quick", "cpu", "paper"], arg(help=SCALES_HELP)] = "quick",
    device: Annotated[str, arg(help="device to compute on: cpu, cuda, cuda:1, ...")] = "cpu",
    out: Out = None,
    workers: Workers = None,
) -> None:
    """Compute missing results, then print each table and the path of the page."""
    if not names:
        raise BadArgument("fedveil reproduce", "no table or figure is specified", f"pass {EXHIBITS_HELP}")
    from fedveil.studies.basis import COMPUTED_AGAIN
    from fedveil.studies.paper.reproduce import reproduce as run

    def print_exhibit(plan: "ExhibitPlan", presentation: "Presentation") -> None:
        print(f"\n{plan.title}\n{textwrap.fill(plan.settings.about, 110)}\n")
        print_result(presentation)

    folder = out or Path("runs") / f"paper-{scale}"
    with print_progress(COMPUTED_AGAIN) as show:
        page = run(names, scale, folder, workers=workers, device=device, show=show, on_done=print_exhibit)
    print(f"\nreport: {page}")


def demo(out: Annotated[Path, arg(help="folder for the report")] = Path("runs/demo")) -> None:
    """Train a plain and a veiled model from scratch, and print how they differ."""
    import torch

    from fedveil.studies.demo import DEMO, Demo

    torch.set_num_threads(1)  # more threads do not help with small matrices, and are slower on a busy machine
    with lock_folder(out):
        shutil.rmtree(out / "jobs", ignore_errors=True)
        run_study(DEMO, Demo(), out, "fedveil demo", 1, as_json=False)
