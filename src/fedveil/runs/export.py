"""Export the model of a run to a file that runs without Fedveil, with its encoding beside it."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.checks import check_choice
from fedveil.errors import BadArgument
from fedveil.federation.targets import refuse_failure
from fedveil.files import write_atomically
from fedveil.graph.inputs import call
from fedveil.records.encoding import FILE, Encoding, OutputForm, format_encoding
from fedveil.runs.predict import Predictor, count_outputs

Format = Literal["torch", "onnx"]
SUFFIXES: dict[Format, str] = {"torch": ".pt2", "onnx": ".onnx"}
PACKAGES = ("onnx", "onnxscript")
WHERE = "fedveil export"
EXAMPLES = 3  # records in the batch with which a model is traced; any number may be passed to the exported model


class ServedModel(nn.Module):
    """A model whose outputs are predictions: probabilities of classes, on axis 1, or numbers in the target's units."""

    def __init__(self, model: nn.Module, encoding: Encoding) -> None:
        super().__init__()
        self.model = model
        self._form = encoding.outputs or OutputForm("values", ())
        self._scale = encoding.target_scale or (0.0, 1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the predictions for inputs that are already encoded."""
        outputs, form, (mean, deviation) = call(self.model, inputs), self._form, self._scale
        if form.kind == "softmax":
            return outputs.movedim(form.class_axis, 1).softmax(1)
        if form.kind == "scores":
            return outputs.movedim(form.class_axis, 1)
        if form.kind == "sigmoid":
            flat = outputs.reshape(-1)
            return outputs.sigmoid() if count_outputs(form) > 1 else torch.stack([-flat, flat], 1).sigmoid()
        return outputs.exp() if form.kind == "exponential" else outputs * deviation + mean


def export_model(predictor: Predictor, path: Path, format: Format = "torch") -> None:
    """Write the model of a run to a file that runs without Fedveil, and its encoding to `encoding.json` beside it.

    The model takes a batch of encoded records of any size, "inputs", and returns "outputs": the probabilities of the
    classes, or numbers in the units of the target (scores, if the loss has no probabilities).

    Args:
        predictor: the model and its encoding, from `fedveil.load_predictor`.
        path: the file.
        format: "torch" writes a file for `torch.export.load`, and "onnx" one for ONNX runtimes.
    """
    check_choice(WHERE, "format", format, SUFFIXES)
    missing = [name for name in PACKAGES if find_spec(name) is None] if format == "onnx" else []
    if missing:
        raise BadArgument(f"{WHERE} --format onnx", f"{missing[0]} is not installed", "pip install 'fedveil[onnx]'")
    text, beside = format_encoding(predictor.encoding), path.parent / FILE
    if beside.is_file() and beside.read_text() != text:
        what = "it is the encoding of another run, which belongs to other files in this folder"
        raise BadArgument(str(beside), what, "choose another folder with --out")
    content = _export(predictor, format)
    write_atomically(path, content)
    write_atomically(beside, text)


def _export(predictor: Predictor, format: Format) -> bytes:
    """Return the bytes of the exported model."""
    forms = predictor.encoding.tensors or {}
    if list(forms) != ["inputs"]:
        what = f"the model takes several tensors: {', '.join(forms)}"
        raise BadArgument(WHERE, what, "export it in Python: torch.export.export(fedveil.load_model(folder), ...)")
    form, file = forms["inputs"], io.BytesIO()
    first = next(predictor.model.parameters())
    dtype = first.dtype if form.dtype.startswith(("float", "bfloat")) else getattr(torch, form.dtype)
    example = torch.zeros((EXAMPLES, *form.shape), dtype=dtype, device=first.device)
    served = copy.deepcopy(ServedModel(predictor.model, predictor.encoding)).eval().requires_grad_(False)
    what, fix = f"{type(predictor.model).__name__} cannot be exported", "export it in Python with torch.export"
    with refuse_failure(WHERE, what, fix), torch.no_grad(), _quiet():
        shapes = {"inputs": {0: torch.export.Dim("batch")}}
        program = torch.export.export(served, (example,), dynamic_shapes=shapes)
        if format == "torch":
            torch.export.save(program, file)
            return file.getvalue()
        given, taken = ["inputs"], ["outputs"]
        found = torch.onnx.export(program, dynamo=True, verbose=False, input_names=given, output_names=taken)
        assert found is not None
        content: bytes = found.model_proto.SerializeToString()
        return content


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's warnings about packages that are not installed, and about torch's own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
