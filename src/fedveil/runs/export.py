"""Export the model of a run, and its encoding, for use without Fedveil."""

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
TRACE_SIZE = 3  # number of records in the batch for tracing; the exported model accepts any number


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
            logits = outputs.reshape(-1)
            return outputs.sigmoid() if count_outputs(form) > 1 else torch.stack([-logits, logits], 1).sigmoid()
        return outputs.exp() if form.kind == "exponential" else outputs * deviation + mean


def export_model(predictor: Predictor, path: Path, format: Format = "torch") -> None:
    """Export the model of a run for use without Fedveil, and write its encoding to `encoding.json` in the same folder.

    The exported model maps "inputs", a batch of encoded records of any size, to "outputs": class probabilities (or
    scores, if the loss does not define probabilities), or numbers in the units of the target.

    Args:
        predictor: the model and its encoding, from `fedveil.load_predictor`.
        path: file for the model.
        format: "torch" for `torch.export.load`, or "onnx" for ONNX runtimes.
    """
    check_choice(WHERE, "format", format, SUFFIXES)
    missing = [name for name in PACKAGES if find_spec(name) is None] if format == "onnx" else []
    if missing:
        raise BadArgument(f"{WHERE} --format onnx", f"{missing[0]} is not installed", "pip install 'fedveil[onnx]'")
    text, encoding_path = format_encoding(predictor.encoding), path.parent / FILE
    if encoding_path.is_file() and encoding_path.read_text() != text:
        message = "the file already contains the encoding of another model"
        raise BadArgument(str(encoding_path), message, "choose another folder with --out")
    content = _export(predictor, format)
    write_atomically(path, content)
    write_atomically(encoding_path, text)


def _export(predictor: Predictor, format: Format) -> bytes:
    """Return the bytes of the exported model."""
    forms = predictor.encoding.tensors or {}
    if list(forms) != ["inputs"]:
        message = f"the model takes several tensors: {', '.join(forms)}"
        raise BadArgument(WHERE, message, "export it in Python: torch.export.export(fedveil.load_model(folder), ...)")
    form, file = forms["inputs"], io.BytesIO()
    parameter = next(predictor.model.parameters())
    dtype = parameter.dtype if form.dtype.startswith(("float", "bfloat")) else getattr(torch, form.dtype)
    example = torch.zeros((TRACE_SIZE, *form.shape), dtype=dtype, device=parameter.device)
    served_model = copy.deepcopy(ServedModel(predictor.model, predictor.encoding)).eval().requires_grad_(False)
    message, fix = f"{type(predictor.model).__name__} cannot be exported", "export it in Python with torch.export"
    with refuse_failure(WHERE, message, fix), torch.no_grad(), _hide_warnings():
        shapes = {"inputs": {0: torch.export.Dim("batch")}}
        program = torch.export.export(served_model, (example,), dynamic_shapes=shapes)
        if format == "torch":
            torch.export.save(program, file)
            return file.getvalue()
        input_names, output_names = ["inputs"], ["outputs"]
        onnx_program = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=input_names, output_names=output_names
        )
        assert onnx_program is not None
        content: bytes = onnx_program.model_proto.SerializeToString()
        return content


@contextlib.contextmanager
def _hide_warnings() -> Iterator[None]:
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
