"""`fedveil audit`: what a participant learns under each defence, as published attacks see it and if it thinks."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.attacks.observed import Observed
from fedveil.data import Data
from fedveil.federation.evaluate import predict
from fedveil.federation.local import Federation
from fedveil.runs.config import Config
from fedveil.studies.agreement import Figures, averaged, view_figures
from fedveil.studies.attack import Experiment
from fedveil.studies.audit.page import present
from fedveil.studies.audit.rebuild import can_rebuild, rebuilt
from fedveil.studies.jobs import Cell, Result, Tell
from fedveil.studies.membership.run import Records, judged, loss_attacks, records_of
from fedveil.studies.victim import observe_all, scene_of, trained


@dataclass(frozen=True)
class Settings:
    """The audit's own flags.

    Attributes:
        trials: records that the attacker tries to rebuild, each in a federation of its own.
        broadcasts: secrets under which a veiled model is looked at; one says little about others.
    """

    trials: int = 20
    broadcasts: int = 10


def membership_figures(observed: Observed, records: Records) -> dict[str, Any]:
    """The loss threshold, by class where there are classes: chosen on known records, judged on the others'."""
    device = next(observed.model.parameters()).device
    outputs = predict(observed.model, records.pool.tensor.to(device)).cpu()
    scores = loss_attacks(observed, outputs, records)
    name = "loss by class" if "loss by class" in scores else "loss"
    found = judged(scores[name], records)
    return {key: found[key] for key in ("accuracy", "auc", "tpr")} | {"attack": name}


def figures_of(federation: Federation, config: Config, data: Data, records: Records | None) -> dict[str, Figures]:
    """What each attacker makes of the next broadcast."""
    found: dict[str, Figures] = {}
    for name, observed in observe_all(federation, config.defence).items():
        found[name] = view_figures(observed.model, federation.model, data)
        if records:
            found[name]["membership"] = membership_figures(observed, records)
    return found


def audit(tell: Tell, config: Config, settings: Settings, folder: Path, run: Path) -> Result:
    """Every figure of one federation, attacker by attacker."""
    federation, data = trained(config, run, tell)
    scene = scene_of(federation, data)
    records = records_of(config, data, everyone=True) if config.clients > 1 else None
    looks: list[dict[str, Figures]] = []
    count = settings.broadcasts if config.defence == "veil" else 1
    for number in range(count):
        tell(number / count, f"broadcast {number + 1}/{count}")
        looks.append(figures_of(federation, config, data, records))
    attackers = {name: averaged([look[name] for look in looks]) for name in looks[0]}
    why = can_rebuild(config, data)
    built = {"left out": why} if why else rebuilt(tell, config, data, settings.trials)
    quality = {"metric": scene.metric, "train": scene.train, "test": scene.test, "gap": scene.gap}
    sizes = {"broadcasts": count, "trials": settings.trials}
    return {
        "defence": config.defence,
        "outputs": data.outputs,
        **quality,
        **sizes,
        "attackers": attackers,
        "rebuilt": built,
    }


def reference_cells(config: Config, settings: Any, defences: Sequence[str], folder: Path) -> list[Cell]:
    """The undefended federation, the reference line of every figure, where it is not audited anyway."""
    if "plain" in defences:
        return []
    own = dataclasses.replace(config, defence="plain")
    run = folder / "plain" / "run"
    return [Cell("undefended", audit, {"config": own, "settings": settings, "folder": folder, "run": run})]


SUITE: Mapping[str, Mapping[str, Any]] = {
    "digits, 2 clients": {"data": "digits", "train_size": 500, "clients": 2, "epochs": 150, "groups": 10},
    "digits, 5 clients": {"data": "digits", "train_size": 500, "clients": 5, "epochs": 150, "groups": 10},
    "bank, two classes": {"data": "bank", "task": "classification", "clients": 3, "epochs": 8, "groups": 2},
    "bank, one output": {"data": "bank", "clients": 3, "epochs": 8},
}
"""What `fedveil audit` looks at without --data."""

AUDIT = Experiment(
    name="audit",
    summary="what a participant learns, as published attacks see it and if it thinks",
    defaults={"clients": 2, "epochs": 150},
    settings=Settings,
    trains=True,
    shared=reference_cells,
    attack=audit,
    present=present,
    title="Audit",
)
