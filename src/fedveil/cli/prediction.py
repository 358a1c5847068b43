"""`fedveil predict` and `export`: make predictions with the model of a run, or export it."""

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

RUN_HELP = "folder of a run"
RECORDS_HELP = "new records: a CSV file, a folder or zip file of images, or an .npy or .npz file of the model's inputs"
OUT_HELP = "file for the predictions: .csv, or .npz for arrays"
MODEL_HELP = "last: the model after the last round; best: the model with the best evaluation"
UNKNOWN_HELP = "refuse categories that did not occur in training, or ignore them, which sets their inputs to 0"
DELIMITER_HELP = "field delimiter, such as ; or tab; by default as in the training file, or detected"
DECIMAL_HELP = "decimal mark in numbers; by default as in the training file"
NETWORK_HELP = "your own model or a function that builds it, as package.module:name, if the run trained your own model"
TRUST_HELP = "import code that the run refers to; use only if you trust it"
FILE_HELP = "file for the model; by default model.pt2 or model.onnx in the folder of the run"
FORMAT_HELP = "torch: for torch.export.load; onnx: for ONNX runtimes (needs fedveil[onnx])"
MAX_LABELS = 10  # maximum number of labels whose counts are printed

Run = Annotated[Path, Positional, arg(metavar="RUN", help=RUN_HELP)]
ModelChoice = Annotated[Literal["last", "best"], arg(help=MODEL_HELP)]
Network = Annotated[str, arg(help=NETWORK_HELP, help_behavior_hint="")]
Trust = Annotated[Switch, arg(help=TRUST_HELP)]


def predict(
    run: Run,
    records: Annotated[Path, Positional, arg(metavar="RECORDS", help=RECORDS_HELP)],
    out: Annotated[Path, arg(help=OUT_HELP)] = Path("predictions.csv"),
    model: ModelChoice = "last",
    unknown: Annotated[Literal["refuse", "ignore"], arg(help=UNKNOWN_HELP)] = "refuse",
    delimiter: Annotated[str | None, arg(help=DELIMITER_HELP, help_behavior_hint="")] = None,
    decimal: Annotated[Literal[".", ","] | None, arg(help=DECIMAL_HELP, help_behavior_hint="")] = None,
    network: Network = "",
    trust_code: Trust = False,
) -> None:
    """Make predictions for new records, encoded like the records of the run."""
    from fedveil.files import write_atomically

    _check_run(run, records)
    if out.suffix not in (".csv", ".npz"):
        raise BadArgument("--out", f"{out} is neither .csv nor .npz", "use --out predictions.csv")
    if out.resolve() == records.resolve():
        raise BadArgument("--out", f"{out} is the file with the records", "choose another file")
    predictor = _load(run, model, network, trust_code)
    predictions = replace(predictor, unknown=unknown, delimiter=delimiter, decimal=decimal)(records)
    for note in predictions.notes:
        print(f"{records}: {note}", file=sys.stderr)
    write_atomically(out, _format_arrays(predictions) if out.suffix == ".npz" else _format_csv(predictions))
    print(f"{len(predictions):,} record{'s' * (len(predictions) != 1)}: {_summarise(predictions)}\npredictions: {out}")


def export(
    run: Run,
    format: Annotated[Literal["torch", "onnx"], arg(help=FORMAT_HELP)] = "torch",
    out: Annotated[Path | None, arg(help=FILE_HELP, help_behavior_hint="")] = None,
    model: ModelChoice = "last",
    network: Network = "",
    trust_code: Trust = False,
) -> None:
    """Export the model for use without Fedveil, and write its encoding to the same folder."""
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

    user_model = load_factory(network) if network else None
    return load_predictor(run, best=model == "best", model=user_model, trust_code=trust_code)


def _format_csv(predictions: "Predictions") -> str:
    """Format the predictions as CSV, with the number of each record, from 1, or the file of each image."""
    columns = predictions.columns()
    identifiers = list(predictions.names) if predictions.names else [row + 1 for row in predictions.rows.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file" if predictions.names else "row", *columns])
    writer.writerows(zip(identifiers, *(values.tolist() for values in columns.values()), strict=True))
    return text.getvalue()


def _format_arrays(predictions: "Predictions") -> bytes:
    import numpy as np

    labels = (
        None
        if predictions.labels is None
        else predictions.labels.astype(np.str_ if predictions.labels.dtype == object else None)
    )
    arrays = {
        "labels": labels,
        "probabilities": predictions.probabilities,
        "values": predictions.values,
        "rows": predictions.rows,
    }
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: values for name, values in arrays.items() if values is not None})
    return file.getvalue()


def _summarise(predictions: "Predictions") -> str:
    """Return the number of records of each label, or the range of the values."""
    import numpy as np

    if predictions.labels is None:
        assert predictions.values is not None
        values = predictions.values
        return f"from {values.min():.6g} to {values.max():.6g}, mean {values.mean():.6g}"
    names, counts = np.unique(predictions.labels.astype(str), return_counts=True)
    most_common = sorted(zip(counts.tolist(), names.tolist(), strict=True), reverse=True)[:MAX_LABELS]
    return ", ".join(f"{name} {count:,}" for count, name in most_common) + (" ..." if len(names) > MAX_LABELS else "")
