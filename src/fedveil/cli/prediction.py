"""`fedveil predict` and `export`: use the model of a run on new records, or without Fedveil."""

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fedveil.cli.parser import Switch
from fedveil.errors import BadArgument

if TYPE_CHECKING:
    from fedveil.runs.predict import Predictions, Predictor

RUN = "folder of a run"
RECORDS = "new records: a CSV file, a folder or zip file of images, or an .npy or .npz file of the model's inputs"
OUT = "file for the predictions: .csv, or .npz for arrays"
MODEL = "the model after the last round, or the one with the best evaluation"
UNKNOWN = "whether categories that training did not have are refused, or ignored: all their inputs are then 0"
DELIMITER = "field delimiter, such as ; or tab; by default that of the training file, or detected"
DECIMAL = "decimal mark in numbers; by default that of the training file"
NETWORK = "package.module:name of a model or of a function that builds it, if the run trained your own model"
TRUST = "import code that the run names; use only if you trust it"
FILE = "file for the model; by default model.pt2 or model.onnx in the folder of the run"
FORMAT = "torch: for torch.export.load; onnx: for ONNX runtimes (needs fedveil[onnx])"
MAX_LABELS = 10  # labels whose counts are printed

Run = Annotated[Path, Positional, arg(metavar="RUN", help=RUN)]
Which = Annotated[Literal["last", "best"], arg(help=MODEL)]
Network = Annotated[str, arg(help=NETWORK, help_behavior_hint="")]
Trust = Annotated[Switch, arg(help=TRUST)]


def predict(
    run: Run,
    records: Annotated[Path, Positional, arg(metavar="RECORDS", help=RECORDS)],
    out: Annotated[Path, arg(help=OUT)] = Path("predictions.csv"),
    model: Which = "last",
    unknown: Annotated[Literal["refuse", "ignore"], arg(help=UNKNOWN)] = "refuse",
    delimiter: Annotated[str | None, arg(help=DELIMITER, help_behavior_hint="")] = None,
    decimal: Annotated[Literal[".", ","] | None, arg(help=DECIMAL, help_behavior_hint="")] = None,
    network: Network = "",
    trust_code: Trust = False,
) -> None:
    """Predict new records, which are encoded as the run's records were."""
    from fedveil.files import write_atomically

    _check_run(run, records)
    if out.suffix not in (".csv", ".npz"):
        raise BadArgument("--out", f"{out} is neither .csv nor .npz", "use --out predictions.csv")
    if out.resolve() == records.resolve():
        raise BadArgument("--out", f"{out} is the file of the records", "choose another file")
    predictor = _load(run, model, network, trust_code)
    found = replace(predictor, unknown=unknown, delimiter=delimiter, decimal=decimal)(records)
    for note in found.notes:
        print(f"{records}: {note}", file=sys.stderr)
    write_atomically(out, _format_arrays(found) if out.suffix == ".npz" else _format_csv(found))
    print(f"{len(found):,} record{'s' * (len(found) != 1)}: {_summarise(found)}\npredictions: {out}")


def export(
    run: Run,
    format: Annotated[Literal["torch", "onnx"], arg(help=FORMAT)] = "torch",
    out: Annotated[Path | None, arg(help=FILE, help_behavior_hint="")] = None,
    model: Which = "last",
    network: Network = "",
    trust_code: Trust = False,
) -> None:
    """Write the model to a file that runs without Fedveil, and its encoding beside it."""
    _check_run(run)
    from fedveil.runs.export import SUFFIXES, export_model

    path = out or run / f"model{SUFFIXES[format]}"
    export_model(_load(run, model, network, trust_code), path, format)
    print(f"model: {path}\nencoding: {path.parent / 'encoding.json'}")


def _check_run(run: Path, records: Path | None = None) -> None:
    """Refuse paths that do not exist, before torch is imported."""
    from fedveil.records.encoding import read_encoding

    read_encoding(run)
    if records is not None and not records.exists():
        raise BadArgument(str(records), "there is no such file", "pass an existing file or folder")


def _load(run: Path, model: str, network: str, trust_code: bool) -> "Predictor":
    from fedveil.runs.build import load_factory
    from fedveil.runs.predict import load_predictor

    own = load_factory(network) if network else None
    return load_predictor(run, best=model == "best", model=own, trust_code=trust_code)


def _format_csv(found: "Predictions") -> str:
    """Return the predictions as CSV, with the number of each record, from 1, or the file of each image."""
    columns = found.columns()
    first = list(found.names) if found.names else [row + 1 for row in found.rows.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file" if found.names else "row", *columns])
    writer.writerows(zip(first, *(values.tolist() for values in columns.values()), strict=True))
    return text.getvalue()


def _format_arrays(found: "Predictions") -> bytes:
    import numpy as np

    labels = None if found.labels is None else found.labels.astype(np.str_ if found.labels.dtype == object else None)
    arrays = {"labels": labels, "probabilities": found.probabilities, "values": found.values, "rows": found.rows}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: own for name, own in arrays.items() if own is not None})
    return file.getvalue()


def _summarise(found: "Predictions") -> str:
    """Return the number of records of each label, or the range of the values."""
    import numpy as np

    if found.labels is None:
        assert found.values is not None
        return f"from {found.values.min():.6g} to {found.values.max():.6g}, mean {found.values.mean():.6g}"
    names, counts = np.unique(found.labels.astype(str), return_counts=True)
    most = sorted(zip(counts.tolist(), names.tolist(), strict=True), reverse=True)[:MAX_LABELS]
    return ", ".join(f"{name} {count:,}" for count, name in most) + (" ..." if len(names) > MAX_LABELS else "")
