"""The architectures of Hugging Face's transformers: tiny configs, batches, losses, and one measurement.

`zoo_transformers.toml` lists one class per architecture. A class is analysed as its users train it: in float32, in
training mode, with a `BatchEncoding`. Gradients are compared in float64, without dropout, with conversions to float32
in forward replaced by conversions to float64.
"""

import copy
import inspect
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import fedveil
from benchmarks.zoo import BOUND
from benchmarks.zoo_measure import declare_torchvision
from fedveil.graph.export import GROUPED_PRODUCTS, multiply_groups
from fedveil.graph.inputs import Inputs, call, each
from fedveil.graph.outputs import choose_output
from fedveil.scheme.losses import Loss, find_loss
from fedveil.scheme.outputs import loss_values

LIST = Path(__file__).with_suffix(".toml")
SIZE, SAMPLES, TOKENS = 32, 3, 12
CHOICES = (None, "prediction_logits", "last_hidden_state", "reconstruction", "start_logits", "logits_per_image")
Settings = Mapping[str, Any]


def names() -> list[str]:
    """Return the names of all classes in the list."""
    return list(_classes())


def _classes() -> dict[str, Settings]:
    """Return the settings of each class that differ from the general ones."""
    sections = tomllib.loads(LIST.read_text())
    return {name: own for key, section in sections.items() if key != "tiny" for name, own in section.items()}


def build(name: str, *, dropout: bool) -> nn.Module:
    """Build a class with a tiny config in training mode, with constants replaced by random numbers."""
    declare_torchvision()
    import transformers

    torch.manual_seed(0)
    kind: Any = getattr(transformers, name)  # type: ignore[explicit-any]
    model: nn.Module = kind(_shrink(kind.config_class, _classes()[name].get("config", {}), dropout=dropout))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.min() == parameter.max():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def _shrink(kind: type[Any], special: Settings, *, dropout: bool) -> Any:  # type: ignore[explicit-any]
    """Return a config with small sizes, as far as its class has settings with these names."""
    default, tiny = kind(), tomllib.loads(LIST.read_text())["tiny"]
    given: dict[str, object] = {}
    for key in {*dir(default), *vars(default)}:
        whole = key in special and (not isinstance(special[key], dict) or "model_type" in special[key])
        if whole or isinstance(getattr(kind, key, None), property):
            continue
        own = getattr(default, key)
        if key in tiny and (isinstance(own, int | float) or key.endswith("token_id")):
            given[key] = tiny[key]
        elif key in ("depths", "num_blocks") and isinstance(own, list | tuple):
            given[key] = [1] * len(own)
        elif key in ("hidden_sizes", "embed_dims", "encoder_hidden_sizes") and isinstance(own, list | tuple):
            given[key] = [tiny["hidden_size"]] * len(own)
        elif hasattr(own, "to_dict") and key.endswith("config"):
            given[key] = _shrink(type(own), special.get(key, {}), dropout=dropout).to_dict()
        elif not dropout and isinstance(own, float) and ("drop" in key or key.startswith("mask_")):
            given[key] = 0.0
    return kind(**{**special, **given})


def batch(model: nn.Module) -> Inputs:
    """Return a batch as a tokenizer, image processor or feature extractor returns it."""
    from transformers import BatchEncoding

    accepted, draw = inspect.signature(model.forward).parameters, torch.Generator().manual_seed(1)
    special, config = _classes()[type(model).__name__].get("inputs", {}), model.config
    words = getattr(getattr(config, "text_config", config), "vocab_size", 60)
    found: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        found["input_ids"] = torch.randint(3, words, (SAMPLES, TOKENS), generator=draw)
        found["input_ids"][:, -1] = 2  # some models read the features of this token, the end
        mask = torch.ones_like(found["input_ids"])
        mask[1, TOKENS - 3 :] = 0
        found["attention_mask"] = mask
    if "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = torch.randint(3, words, (SAMPLES, TOKENS), generator=draw)
    if "pixel_values" in accepted:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", SIZE)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        found["pixel_values"] = torch.randn(SAMPLES, getattr(vision, "num_channels", 3), height, width, generator=draw)
    for key, shape in (("input_values", (1600,)), ("input_features", (16, 64))):
        if key in accepted and not found.keys() - {"decoder_input_ids"}:
            found[key] = torch.randn(SAMPLES, *shape, generator=draw)
    for key, form in special.items():
        shape = (SAMPLES, *form)
        if key == "input_ids":
            found[key] = torch.randint(3, words, shape, generator=draw)
        else:
            floats = not key.endswith(("ids", "mask", "bbox"))
            found[key] = torch.randn(shape, generator=draw) if floats else torch.ones(shape, dtype=torch.long)
    encoding: Inputs = BatchEncoding(found)
    return encoding


def objectives(name: str, outputs: Tensor) -> tuple[str, Tensor]:
    """Return the name of a loss that suits the outputs, and targets."""
    draw = torch.Generator().manual_seed(2)
    if outputs.dim() == 2 and 1 < outputs.shape[1] < 60:
        return "cross_entropy", torch.randint(0, outputs.shape[1], (len(outputs),), generator=draw)
    if outputs.dim() == 3 and ("LM" in name or "Generation" in name or "MTModel" in name):
        labels = torch.randint(0, outputs.shape[-1], outputs.shape[:-1], generator=draw)
        labels[:, :2] = -100
        return ("causal" if "Causal" in name or "LMHead" in name else "token") + "_cross_entropy", labels
    return "squared_error", torch.randn(outputs.shape, generator=draw)


class InFloat64(TorchFunctionMode):
    """A mode in which conversions to float32 are conversions to float64, the default dtype."""

    def __enter__(self) -> Self:
        """Enter the mode."""
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # type: ignore[explicit-any]
        """Leave the mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Settings | None = None
    ) -> object:
        """Call the function with float64 in place of float32."""
        func = Tensor.double if func is Tensor.float else func
        func = multiply_groups if getattr(func, "__name__", "") in GROUPED_PRODUCTS else func  # has no float64

        def change(leaf: object) -> object:
            return torch.float64 if leaf is torch.float32 else leaf

        return func(*pytree.tree_map(change, tuple(args)), **pytree.tree_map(change, dict(kwargs or {})))


def measure(name: str, adapt: Callable[[nn.Module], nn.Module] = lambda model: model) -> dict[str, object]:
    """Analyse a class as its users train it, and compare its recovered gradients with those of autograd.

    `adapt` adds an adapter to the model.
    """
    warnings.simplefilter("ignore")
    try:
        plain, exact = build(name, dropout=True), adapt(build(name, dropout=False)).double()
        inputs, model = batch(plain), adapt(plain)
        with torch.no_grad():
            returned = copy.deepcopy(model)(**inputs)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0][:200]
        return {"result": "not built", "reason": f"{type(error).__name__}: {why}"}
    began = time.monotonic()
    try:
        output, outputs = _choose(name, model, inputs)
        loss, targets = objectives(name, outputs)
        plan = fedveil.analyse(model, inputs, output=output)
        _recover(model, plan, inputs, loss, targets)
        seconds = round(time.monotonic() - began, 1)
        with InFloat64():
            error = _worst_error(exact, each(_double, inputs), output, loss, _double(targets))
    except fedveil.FedveilError as error:
        return {"result": "refused", "reason": str(error).split("\n")[0], "seconds": round(time.monotonic() - began, 1)}
    parts = [*([f"output={output!r}"] if output else []), loss, *([] if isinstance(returned, Mapping) else ["a tuple"])]
    found = {"error": error, "coverage": plan.coverage, "seconds": seconds, "note": ", ".join(parts)}
    return {"result": "exact" if error < BOUND else "wrong", **found}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _choose(name: str, model: nn.Module, inputs: Inputs) -> tuple[str | None, Tensor]:
    """Return the first choice of output that the model has, and the outputs."""
    refusals: list[fedveil.FedveilError] = []
    for output in [*_classes()[name].get("output", ()), *CHOICES]:
        view = choose_output(model, output)
        try:
            with torch.no_grad():
                return output, call(copy.deepcopy(view), inputs)
        except fedveil.FedveilError as error:
            refusals.append(error)
    raise refusals[0]


def _recover(model: nn.Module, plan: fedveil.Plan, inputs: Inputs, loss: str, targets: Tensor) -> Mapping[str, Tensor]:
    """Return the gradients that a server recovers from one client's update."""
    perturbation = fedveil.Veil().perturb(model, plan, loss)
    return perturbation.recover([fedveil.client_step(model, perturbation.broadcast, inputs, targets)]).gradients


def _worst_error(model: nn.Module, inputs: Inputs, output: str | None, loss: str, targets: Tensor) -> float:
    """Return |found - true| / |all true| for the worst parameter."""
    inputs, targets = each(lambda own: own[:2], inputs), targets[:2]  # the number of samples that is analysed
    plan, view = fedveil.analyse(model, inputs, output=output), choose_output(model, output)
    names = [entry.name for entry in plan.layout.trainable]
    objective: Loss = find_loss(loss)
    own = copy.deepcopy(view)
    value = loss_values(objective, call(own, inputs), targets).mean()
    true = torch.autograd.grad(value, [own.get_parameter(name) for name in names], allow_unused=True)
    found = _recover(model, plan, inputs, loss, targets)
    known = {name: found[name] * 0 if own is None else own for name, own in zip(names, true, strict=True)}
    whole = torch.stack([own.norm() for own in known.values()]).norm()
    return max(float((found[name] - own).norm() / whole) for name, own in known.items())
