"""The classes of Hugging Face's transformers: tiny configs, batches, losses, and one measurement."""

import copy
import importlib
import inspect
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fedveil
from benchmarks.zoo import BOUND
from fedveil.graph.inputs import Inputs, call
from fedveil.graph.outputs import choose_output
from fedveil.scheme.losses import Loss, find_loss
from fedveil.scheme.outputs import values

AUTO = "transformers.models.auto.modeling_auto"
WIDTH, HEADS, INNER, WORDS, LABELS, SIZE, SAMPLES, TOKENS = 16, 2, 24, 60, 3, 32, 3, 12
TINY: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "decoder_hidden_size"), WIDTH),
    **dict.fromkeys(("projection_dim", "embedding_size", "word_embed_proj_dim", "hidden_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "num_encoder_layers", "num_decoder_layers", "num_block"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels"), WIDTH // HEADS),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "d_inner"), INNER),
    **dict.fromkeys(("decoder_intermediate_size", "moe_intermediate_size", "n_inner", "hidden_dim_ff"), INNER),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "router_top_k"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions"), 64),
    "vocab_size": WORDS, "type_vocab_size": 2, "image_size": SIZE, "patch_size": 8, "num_labels": LABELS,
    "hidden_dropout_prob": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "num_mel_bins": 16, "attention_window": 4,
}  # fmt: skip
CHOICES = (None, "prediction_logits", "last_hidden_state", "reconstruction", "start_logits", "logits_per_image")


def names() -> list[str]:
    """Return the names of all classes that transformers creates automatically, in alphabetical order."""
    return sorted(_types())


def _types() -> dict[str, str]:
    """Return the type of model for each class."""
    module = importlib.import_module(AUTO)
    maps = [own for name, own in vars(module).items() if name.startswith("MODEL") and name.endswith("MAPPING_NAMES")]
    found: dict[str, str] = {}
    for mapping in maps:
        for kind, classes in mapping.items():
            for name in classes if isinstance(classes, tuple | list) else (classes,):
                found.setdefault(name, kind)
    return found


def build(name: str) -> nn.Module:
    """Build a class with a tiny config, in float64 and evaluation mode, with constants replaced by random numbers."""
    import transformers

    torch.manual_seed(0)
    config = _shrink(type(transformers.AutoConfig.for_model(_types()[name])))
    if name.endswith("QuestionAnswering"):
        config.num_labels = 2
    model: nn.Module = getattr(transformers, name)(config)
    model = model.eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.min() == parameter.max():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _shrink(kind: type[Any]) -> Any:  # type: ignore[explicit-any]
    """Return a config with small sizes, as far as its class has settings with these names."""
    default = kind()
    known = {key: getattr(default, key) for key in TINY if hasattr(default, key)}
    numbers = [key for key, own in known.items() if isinstance(own, int | float) or key.endswith("token_id")]
    given: dict[str, object] = {key: TINY[key] for key in numbers}
    for key, own in vars(default).items():
        if key in ("depths", "num_blocks"):
            given[key] = [1] * len(own)
        elif key in ("hidden_sizes", "embed_dims", "encoder_hidden_sizes") and isinstance(own, list):
            given[key] = [WIDTH] * len(own)
        elif hasattr(own, "to_dict") and key.endswith("config"):
            given[key] = _shrink(type(own)).to_dict()
    return kind(**given)


def batch(model: nn.Module) -> Inputs:
    """Return a batch as a tokenizer, image processor or feature extractor returns it."""
    from transformers import BatchEncoding

    accepted = inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        found["input_ids"] = torch.randint(3, WORDS, (SAMPLES, TOKENS), generator=draw)
        found["input_ids"][:, -1] = 2  # some models read the features of this token, the end
        mask = torch.ones_like(found["input_ids"])
        mask[1, TOKENS - 3 :] = 0
        found["attention_mask"] = mask
    if "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = torch.randint(3, WORDS, (SAMPLES, TOKENS), generator=draw)
    if "pixel_values" in accepted:
        config = model.config
        size = getattr(getattr(config, "vision_config", config), "image_size", SIZE)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
        found["pixel_values"] = torch.randn(SAMPLES, channels, height, width, generator=draw).double()
    if "input_values" in accepted and not found:
        found["input_values"] = torch.randn(SAMPLES, 1600, generator=draw).double()
    if "input_features" in accepted and not found:
        found["input_features"] = torch.randn(SAMPLES, 16, 64, generator=draw).double()
    if type(model).__name__.endswith("MultipleChoice"):  # two texts per record
        found = {key: own.unsqueeze(1).repeat(1, 2, *[1] * (own.dim() - 1)) for key, own in found.items()}
    encoding: Inputs = BatchEncoding(found)
    return encoding


def objectives(name: str, outputs: Tensor, inputs: Inputs) -> tuple[str, Tensor]:
    """Return the name of a loss that suits the outputs, and targets."""
    draw = torch.Generator().manual_seed(2)
    if outputs.dim() == 2 and 1 < outputs.shape[1] < WORDS:
        return "cross_entropy", torch.randint(0, outputs.shape[1], (len(outputs),), generator=draw)
    if outputs.dim() == 3 and ("LM" in name or "Token" in name):
        labels = torch.randint(0, outputs.shape[-1], outputs.shape[:-1], generator=draw)
        labels[:, :2] = -100
        return ("causal" if "Causal" in name or "LMHead" in name else "token") + "_cross_entropy", labels
    return "squared_error", torch.randn(outputs.shape, generator=draw).double()


def measure(name: str) -> dict[str, object]:
    """Compare a class's recovered gradients with those of autograd."""
    warnings.simplefilter("ignore")
    try:
        model = build(name)
        inputs = batch(model)
        with torch.no_grad():
            returned = copy.deepcopy(model)(**inputs)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0][:200]
        return {"result": "not built", "reason": f"{type(error).__name__}: {why}"}
    began = time.monotonic()
    try:
        view, output, outputs = _choose(model, inputs)
        loss, targets = objectives(name, outputs, inputs)
        plan = fedveil.analyse(model, inputs, output=output)
    except fedveil.FedveilError as error:
        return {"result": "refused", "reason": str(error).split("\n")[0], "seconds": round(time.monotonic() - began, 1)}
    error = _worst_error(model, view, plan, inputs, loss, targets)
    seconds = round(time.monotonic() - began, 1)
    parts = [*([f"output={output!r}"] if output else []), loss, *([] if isinstance(returned, Mapping) else ["a tuple"])]
    note = ", ".join(parts)
    result = "exact" if error < BOUND else "wrong"
    return {"result": result, "error": error, "coverage": plan.coverage, "seconds": seconds, "note": note}


def _choose(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, str | None, Tensor]:
    """Return the view of the first choice of output that the model has, the choice and the outputs."""
    refusals: list[fedveil.FedveilError] = []
    for output in CHOICES:
        view = choose_output(model, output)
        try:
            with torch.no_grad():
                return view, output, call(copy.deepcopy(view), inputs)
        except fedveil.FedveilError as error:
            refusals.append(error)
    raise refusals[0]


def _worst_error(
    model: nn.Module, view: nn.Module, plan: fedveil.Plan, inputs: Inputs, loss: str, targets: Tensor
) -> float:
    """Return |found - true| / max(|true|, 1e-6 |all true|) for the worst parameter."""
    perturbation = fedveil.Veil().perturb(model, plan, loss)
    update = fedveil.client_step(copy.deepcopy(model), perturbation.broadcast, inputs, targets)
    found = perturbation.recover([update]).gradients
    names = [entry.name for entry in plan.layout.trainable]
    objective: Loss = find_loss(loss)
    value = values(objective, call(view, inputs), targets).mean()
    true = torch.autograd.grad(value, [model.get_parameter(name) for name in names], allow_unused=True)
    return max(_errors(found, dict(zip(names, true, strict=True))))


def _errors(found: Mapping[str, Tensor], true: Mapping[str, Tensor | None]) -> Iterator[float]:
    known = {name: torch.zeros_like(found[name]) if own is None else own for name, own in true.items()}
    whole = float(torch.stack([own.norm() for own in known.values()]).norm())
    for name, own in known.items():
        yield float((found[name] - own).norm()) / max(float(own.norm()), 1e-6 * whole)
