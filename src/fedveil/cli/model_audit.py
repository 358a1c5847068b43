"""`fedveil audit --model my_package:Net --weights FILE --members FILE --others FILE`: audit any PyTorch model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from fedveil.cli.parser import HELP_ALL, Json, parse
from fedveil.cli.show import print_progress, print_result
from fedveil.cli.studies import MODEL_AUDIT_FLAGS
from fedveil.errors import BadArgument
from fedveil.lookup import import_object
from fedveil.runs.settings import Value, format_flags

WHERE = "fedveil audit"
MODEL_HELP = "model, or function that builds it: my_package.module:Net"
WEIGHTS_HELP = "the model's values: .safetensors, or .pt with a state_dict"
MEMBERS_HELP = "records that the model was trained on: CSV file of numbers, .npz file with arrays inputs and targets, "
MEMBERS_HELP += "or folder with one subfolder of images per class"
OTHERS_HELP = "records that the model was not trained on, in the same form"
TARGET_HELP = "target column of a CSV file; by default the last one"
LOSS_HELP = "loss that the model was trained with; by default cross_entropy for classes"
TRAIN_HELP = "function that trains a shadow model: my_package:train takes (inputs, targets) and returns a model"
TASK_HELP = "type of task; by default classification if targets are integers"


@dataclass(frozen=True)
class ModelAuditCommand:
    """Audit a trained model with its training records and other records."""

    model: Annotated[str, arg(help=MODEL_HELP, help_behavior_hint="(required)")] = ""
    weights: Annotated[Path | None, arg(help=WEIGHTS_HELP, help_behavior_hint="(required)")] = None
    members: Annotated[Path | None, arg(help=MEMBERS_HELP, help_behavior_hint="(required)")] = None
    others: Annotated[Path | None, arg(help=OTHERS_HELP, help_behavior_hint="(required)")] = None
    target: Annotated[str, arg(help=TARGET_HELP, help_behavior_hint="")] = ""
    task: Annotated[Literal["classification", "regression"] | None, arg(help=TASK_HELP, help_behavior_hint="")] = None
    size: Annotated[int, arg(help="side length of the images in pixels; pixels are in [0, 1]")] = 32
    loss: Annotated[str, arg(help=LOSS_HELP, help_behavior_hint="")] = ""
    train: Annotated[str, arg(help=TRAIN_HELP, help_behavior_hint="")] = ""
    shadows: Annotated[int, arg(help="number of shadow models, if --train is given")] = 16
    network: Annotated[bool, arg(help="also train an attack network")] = True
    seed: Annotated[int, arg(help="seed for dividing the records and training shadow models")] = 0
    out: Annotated[Path, arg(help="folder for the page and the table of records")] = Path("runs/model-audit")
    as_json: Json = False

    def run(self) -> None:
        """Audit the model, write the page and a CSV file of the exposures, and print the result."""
        from fedveil.report import write
        from fedveil.runs.build import load_factory
        from fedveil.studies.model_audit import audit_model
        from fedveil.studies.model_audit.files import load_weights, read_members_and_others

        if not (self.model and self.weights and self.members and self.others):
            flags = {
                "--model": self.model,
                **dict(zip(MODEL_AUDIT_FLAGS, (self.weights, self.members, self.others), strict=True)),
            }
            missing = ", ".join(flag for flag, value in flags.items() if not value)
            raise BadArgument(WHERE, f"flags are missing: {missing}", "pass --model, --weights, --members and --others")
        train = import_object(self.train, "a function that trains", "my_package:train") if self.train else None
        if train is not None and not callable(train):
            raise BadArgument(
                self.train, f"expected a function, got {type(train).__name__}", "use --train my_package:train"
            )
        model = load_weights(load_factory(self.model), self.weights)
        members, others = read_members_and_others(
            self.members, self.others, target=self.target, task=self.task, size=self.size
        )
        with print_progress() as show:
            result = audit_model(
                model,
                members,
                others,
                loss=self.loss or None,
                train=train,
                shadows=self.shadows,
                network=self.network,
                seed=self.seed,
                progress=lambda fraction, text: show("audit", fraction, text),
            )
        command = f"{WHERE} {format_flags(self.changed_values())}"
        presentation, page, table = result.present(), self.out / "report.html", self.out / "records.csv"
        write(presentation.page(command), page)
        result.write_records(table)
        print_result(
            presentation, f"\n{result.sentence}\n", f"report: {page}", f"records: {table}", as_json=self.as_json
        )

    def changed_values(self) -> dict[str, Value]:
        """Return the flags that differ from their defaults, for the command that repeats the audit."""
        values = {name: value for name, value in vars(self).items() if name != "as_json"}
        changed = {name: value for name, value in values.items() if value != getattr(ModelAuditCommand, name)}
        return {name: value if isinstance(value, int) else str(value) for name, value in changed.items()}


def run_model_audit(prog: str, words: Sequence[str], description: str) -> None:
    """Parse the flags and audit the model."""
    words = ["--help" if word == HELP_ALL else word for word in words]
    parse(ModelAuditCommand(), prog, words, description).run()
