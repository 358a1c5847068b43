"""Train an MLP on bank in the paper's setting, with a rounding baseline: `fedveil reproduce table1 --scale paper`."""

from benchmarks.full.tasks import Run
from fedveil.data import Data
from fedveil.federation import Federation
from fedveil.runs.build import build_federation
from fedveil.runs.settings import Config
from fedveil.studies.compare import baseline_settings
from fedveil.studies.paper.plan import read_plan
from fedveil.studies.paper.training import list_configs


def paper_config(run: Run) -> Config:
    """Return the paper's configuration of a run; that of the rounding baseline is plain but for the rounding."""
    defence = "veil" if run.defence == "veil" else "plain"
    wanted = run.layers, run.clients, defence, run.seed, run.epochs
    for config in list_configs(read_plan("table1", "paper")):
        own = config.training
        if wanted == (config.model.layers, config.data.clients, config.defence.name, own.seed, own.epochs):
            more = baseline_settings(run.seed + 1) if run.defence == "rounding" else ()
            return config.changed(settings=more) if more else config
    raise ValueError(f"{run.name} is not in the paper's table 1")


def build(run: Run, data: Data) -> Federation:
    """Return the federation of a run, before the first round."""
    return build_federation(paper_config(run), data)
