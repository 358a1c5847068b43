"""`fedveil attack`, `audit`, `compare`, `reproduce` and `demo`: studies, which go on where they were stopped."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union

from tyro.conf import Suppress, arg, subcommand

from fedveil.checks import whole
from fedveil.cli import attacks as registry
from fedveil.cli.flags import HELP, Federated, Json, Switch
from fedveil.cli.show import live, print_shown
from fedveil.errors import BadArgument
from fedveil.locks import locked
from fedveil.lookup import installed
from fedveil.runs.config import CODE, HOME, PAPER, Config, Value, configure, flags_of

if TYPE_CHECKING:
    from fedveil.studies.paper.plan import Plan
    from fedveil.studies.study import Shown, Study

S = TypeVar("S")
COMPARED = "built-in, installed or package.module:Class; baseline is plain training with one rounding error more"
EXHIBITS = "all, or some of table1, table2, fig3, table3, table4, fig4, fig5"
SCALES = "quick: minutes, embedded data; cpu: two cores, up to two hours per table; paper: its own, for a GPU"
Out = Annotated[Path | None, arg(help="folder of the results, where a stopped command goes on; by default in runs")]
Workers = Annotated[int | None, arg(help="processes side by side; by default one per core")]


def run_study(study: "Study[S, Any]", asked: S, folder: Path, command: str, workers: Workers, as_json: bool) -> None:
    """Compute what is not there yet, write the page and print the table."""
    from fedveil.studies.study import gather, publish

    if workers is not None:
        whole("fedveil", "--workers", workers)
    command = f"{command} {flags_of({'out': str(folder)})}"
    with locked(folder):
        with live() as show:
            results = gather(study, asked, folder, workers=workers, show=show)
        shown = publish(study, asked, results, folder, command)
    verdict = f"\n{textwrap.fill(shown.verdict, 110)}\n"
    print_shown(shown, verdict, f"report: {folder / 'report.html'}", f"repeat: {command}", as_json=as_json)


def with_loss(config: Config) -> Config:
    """The configuration with a loss: for the user's own data, the one that `fedveil train` takes."""
    from fedveil.runs.build import load_data, settled

    return config if config.training.loss else settled(config, load_data(config))


@dataclass(frozen=True)
class Attack(Federated):
    """`fedveil attack NAME`, on one federation under several defences."""

    prefix: ClassVar[str] = "attack-"
    where: ClassVar[str]
    study: ClassVar[Any]  # an AttackStudy
    attack: Annotated[Any, Suppress] = None
    run: Annotated[Path | None, arg(help="attack the federation that a run left in this folder")] = None
    out: Out = None
    workers: Workers = None
    as_json: Json = False

    @classmethod
    def of(cls, name: str, where: str) -> type[Self]:
        """The command with the flags and defaults of an attack."""
        study = registry.find_attack(name)
        own = ("attack", study.options, dataclasses.field(default=study.options()))
        fixed = {"study": study, "defaults": {"defence": "all", **PAPER, **study.defaults}, "where": where}
        made: Any = dataclasses.make_dataclass(cls.__name__, [own], bases=(cls,), namespace=fixed, frozen=True)
        return made  # type: ignore[no-any-return]

    @classmethod
    def read(cls, prog: str, words: Sequence[str], about: str) -> Self:
        """The command of an attack; without a name, the attacks that there are."""
        if words and words[0] in HELP:
            lines = [f"  {name:<12}{summary}" for name, summary in registry.attack_names().items()]
            print(f"usage: {prog} NAME [FILE] [FLAGS]\n\n{about}\n\nattacks:", *lines, sep="\n")
            raise SystemExit(0)
        kind = cls.of(name := words[0] if words else "", f"{prog} {name}")
        return super(Attack, kind).read(kind.where, words[1:], f"{about}\n\n{name}: {kind.study.summary}")

    @classmethod
    def shape(cls) -> Any:
        """One command per attack, for completion."""
        kinds: Any = [Annotated[cls.of(name, ""), subcommand(name)] for name in registry.attack_names()]
        return dataclasses.make_dataclass("Attacks", [("name", Union[tuple(kinds)])])  # noqa: UP007

    def __call__(self) -> None:
        """Attack the federation of a run, or of a configuration."""
        run = self.run or (self.file if self.file and self.file.is_dir() else None)
        folder = self.out or (run or Path("runs")) / f"{self.prefix}{self.study.name}"
        self.measure(self.config_of(run) if run else self.config, folder, run)

    def config_of(self, run: Path) -> Config:
        """The configuration of a run; code that it names must be named here too, or trusted."""
        from fedveil.runs.folder import read_config

        named = {key: value for key, value in self.config.flat().items() if key in CODE and key in self.given}
        if ":" not in str(named.get("defence", ":")):
            raise BadArgument(self.where, "a run has its own defence", f"leave out --defence, or {run}")
        config = read_config(run, trust_code=self.trust_code, named=named)
        for key, value in named.items():
            if value != (own := config.flat()[key]):
                raise BadArgument(self.where, f"the run here has {key} = {own!r}, not {value!r}", f"leave out --{key}")
        return config

    def measure(self, config: Config, folder: Path, run: Path | None = None) -> None:
        """Attack, and print the table."""
        from fedveil.studies.attack import AttackRequest, plain_values
        from fedveil.studies.compare import DEFENCES, check_defences
        from fedveil.studies.federations import describe_run

        config = with_loss(config)
        named = config.defence.name if run else self.config.defence.name
        defences = DEFENCES if named == "all" else tuple(named.split(","))
        check_defences(defences, (*DEFENCES, *installed("fedveil.defences")), "--defence")
        told, usual = {"data", *config.changes(), *self.study.defaults}, plain_values(self.study.options())
        values = {name: value for name, value in config.flat().items() if name in told}
        if run:
            values = {"run": str(run)} | ({"trust_code": True} if self.trust_code else {})
            values |= {key: config.flat()[key] for key in CODE if key in self.given}
        else:
            values |= {"defence": ",".join(defences)}
        values |= {name: value for name, value in plain_values(self.attack).items() if value != usual[name]}
        notes = tuple(describe_run(config, run)) if run else ()
        asked = AttackRequest(config.changed(defence=defences[0]), defences, self.attack, run, notes=notes)
        run_study(self.study, asked, folder, f"{self.where} {flags_of(values)}", self.workers, self.as_json)


@dataclass(frozen=True)
class Audit(Attack):
    """`fedveil audit`, which takes a run's folder in place of a file too."""

    prefix: ClassVar[str] = ""
    harden: Annotated[Switch, arg(help="measure what hardens the veil instead")] = False
    seeds: Annotated[int, arg(help="runs of each setting with --harden")] = 5

    @classmethod
    def read(cls, prog: str, words: Sequence[str], about: str) -> Self:
        """The command, with the audit's own flags."""
        kind: type[Self] = cls.shape()
        return super(Attack, kind).read(prog, words, about)

    @property
    def suite(self) -> bool:
        """Whether it names neither a federation nor a value of it."""
        return not (self.file or self.run or set(self.given) & (HOME.keys() - {"defence"}))

    @classmethod
    def shape(cls) -> Any:
        """With the audit's own flags."""
        return cls.of(registry.AUDIT, "fedveil audit")

    def __call__(self) -> None:
        """Audit a run, a configuration or the standard suite, or measure what hardens the veil."""
        if self.harden:
            self.measure_hardening()
        elif self.suite:
            self.audit_suite(self.out or Path("runs/audit"))
        else:
            super().__call__()

    def measure_hardening(self) -> None:
        """Measure what hardens the veil, in the federation of the flags."""
        from fedveil.studies.attack import plain_values
        from fedveil.studies.audit.harden import HARDEN, Hardening, base_values, default_options

        if self.run or self.file:
            raise BadArgument(self.where, "--harden trains federations of its own", "give flags in place of a run")
        values, own = self.config.flat(), plain_values(self.attack)
        given = {name: values[name] for name in self.given if name in HOME}
        looks: dict[str, Any] = {name: own[name] for name in self.given if name in own}
        base, seeds = base_values(given), whole(self.where, "--seeds", self.seeds)
        asked = Hardening(base, seeds, dataclasses.replace(default_options(base), **looks))
        told = given | {"seeds": seeds} | looks
        folder, command = self.out or Path("runs/hardening"), f"{self.where} --harden {flags_of(told)}"
        run_study(HARDEN, asked, folder, command, self.workers, self.as_json)

    def audit_suite(self, folder: Path) -> None:
        """Audit the federations of the standard suite whose data are here."""
        from fedveil.data import available
        from fedveil.studies.audit.run import SUITE

        missing = {entry.name for entry in available() if entry.state == "missing"}
        for name, values in SUITE.items():
            config = configure({**PAPER, **values})
            print(f"{name}\n", file=sys.stderr if self.as_json else sys.stdout)
            if config.data.name in missing:
                print(f"left out: fedveil data get {config.data.name}, or set FEDVEIL_DATA\n", file=sys.stderr)
            else:
                self.measure(config, folder / name.replace(", ", "-").replace(" ", "-"))


@dataclass(frozen=True)
class Compare(Federated):
    """`fedveil compare`."""

    defaults: ClassVar[Mapping[str, Value]] = PAPER
    defences: Annotated[str, arg(help=COMPARED)] = "plain,baseline,veil,ppdl,dbcl,spn"
    seeds: Annotated[int, arg(help="runs of each, from --seed on")] = 3
    out: Out = None
    workers: Workers = None
    as_json: Json = False

    def __call__(self) -> None:
        """Train what is not trained yet, and print the table."""
        from fedveil.studies.compare import COMPARE, Comparands

        config = with_loss(self.config)
        asked = Comparands(config, tuple(self.defences.split(",")), self.seeds)
        title = f"compare-{config.data.name}-{config.model.name}".replace(":", ".")
        values = config.changes() | {"defences": self.defences, "seeds": self.seeds}
        command, folder = f"fedveil compare {flags_of(values)}", self.out or Path("runs") / title
        run_study(COMPARE, asked, folder, command, self.workers, self.as_json)


def reproduce(
    names: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]", help=EXHIBITS, help_behavior_hint="(required)")],
    scale: Annotated[Literal["quick", "cpu", "paper"], arg(help=SCALES)] = "quick",
    device: Annotated[str, arg(help="where to compute: cpu, cuda, cuda:1 ...")] = "cpu",
    out: Out = None,
    workers: Workers = None,
) -> None:
    """Compute what is not there yet, print each table, say where the page is."""
    if not names:
        raise BadArgument("fedveil reproduce", "nothing is named", EXHIBITS)
    from fedveil.studies.paper.reproduce import reproduce as run

    def done(plan: "Plan", shown: "Shown") -> None:
        print(f"\n{plan.title}\n{textwrap.fill(plan.settings.about, 110)}\n")
        print_shown(shown)

    folder = out or Path("runs") / f"paper-{scale}"
    with live() as show:
        page = run(names, scale, folder, workers=workers, device=device, show=show, on_done=done)
    print(f"\nreport: {page}")


def demo(out: Annotated[Path, arg(help="folder of the report")] = Path("runs/demo")) -> None:
    """Show the library at work, computed anew each time."""
    import torch

    from fedveil.studies.demo import DEMO, Demo

    torch.set_num_threads(1)  # matrices this small gain nothing from more, and lose much on a busy machine
    with locked(out):
        shutil.rmtree(out / "jobs", ignore_errors=True)
        run_study(DEMO, Demo(), out, "fedveil demo", 1, as_json=False)
