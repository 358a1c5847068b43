"""torch's losses with a mean of their own, which are no value per sample, and the function that says the same."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import BadArgument

MOST_WEIGHTS = 32  # that a message prints


class _Form(NamedTuple):
    """A loss of torch: its function, which settings it has, and which of our losses has the same minimum."""

    function: Callable[..., Tensor]
    settings: Mapping[str, object]  # by name, with torch's defaults
    ours: str | None = None
    alike: bool = True  # targets have the outputs' shape
    exact: bool = False  # ours is the same, not only up to a factor


FORMS: dict[type[nn.Module], _Form] = {
    nn.CrossEntropyLoss: _Form(
        F.cross_entropy,
        {"weight": None, "ignore_index": -100, "label_smoothing": 0.0},
        "cross_entropy",
        alike=False,
        exact=True,
    ),
    nn.NLLLoss: _Form(F.nll_loss, {"weight": None, "ignore_index": -100}, alike=False),
    nn.MultiMarginLoss: _Form(F.multi_margin_loss, {"p": 1, "margin": 1.0, "weight": None}, "hinge", alike=False),
    nn.BCEWithLogitsLoss: _Form(
        F.binary_cross_entropy_with_logits, {"weight": None, "pos_weight": None}, "binary_cross_entropy"
    ),
    nn.BCELoss: _Form(F.binary_cross_entropy, {"weight": None}),
    nn.MSELoss: _Form(F.mse_loss, {}, "squared_error"),
    nn.L1Loss: _Form(F.l1_loss, {}, "absolute_error"),
    nn.HuberLoss: _Form(F.huber_loss, {"delta": 1.0}, "huber"),
    nn.SmoothL1Loss: _Form(F.smooth_l1_loss, {"beta": 1.0}),
    nn.PoissonNLLLoss: _Form(F.poisson_nll_loss, {"log_input": True, "full": False, "eps": 1e-8}, "poisson"),
    nn.KLDivLoss: _Form(F.kl_div, {"log_target": False}),
    nn.SoftMarginLoss: _Form(F.soft_margin_loss, {}),
}


def refuse_reduced(loss: object) -> None:
    """Refuse a loss of torch that reduces a batch to one number; the fix keeps all its settings."""
    form, given = _find_form(loss)
    reduction = str(given.get("reduction", "mean"))
    if form is not None and reduction != "none":
        name = type(loss).__name__ if isinstance(loss, nn.Module) else form.function.__name__
        changed = {
            key: given[key] for key, usual in form.settings.items() if not _is_usual(given.get(key, usual), usual)
        }
        _refuse(name, form, changed, reduction)


def _find_form(loss: object) -> tuple[_Form | None, Mapping[str, Any]]:
    """The form of a module, of a function or of one with keyword arguments, and the settings that it was given."""
    if isinstance(loss, nn.Module):
        return FORMS.get(type(loss)), vars(loss) | dict(loss.named_buffers())
    function, given = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    return next((form for form in FORMS.values() if form.function is function), None), given


def _is_usual(value: object, usual: object) -> bool:
    return value is usual or (not isinstance(value, Tensor) and value == usual)


def _refuse(name: str, form: _Form, settings: Mapping[str, Any], reduction: str) -> NoReturn:
    does = {"sum": "sums over the batch", "batchmean": "divides by the batch itself"}.get(reduction, "takes the mean")
    weighted = not form.alike and (settings.keys() & {"weight", "ignore_index"}) and reduction == "mean"
    by = ", over the sum of the weights that it counts" if weighted else ""
    what = f"torch's {name} {does} itself{by}, and a client's loss is one value per sample; their mean is over samples"
    batch = "loss=fedveil.BatchLoss(your_loss) for torch's mean in each client's batch" if weighted else None
    fixes = [_name_ours(form, settings), batch, f"loss={_write(form, settings, reduction)}"]
    raise BadArgument("loss", what, "use " + ", or ".join(fix for fix in fixes if fix))


def _name_ours(form: _Form, settings: Mapping[str, Any]) -> str | None:
    """Name the loss of this library that has all these settings, if there is one."""
    if (
        form.ours == "cross_entropy"
        and settings
        and "ignore_index" not in settings
        and _is_short(settings.get("weight"))
    ):
        values = {key: tuple(v.tolist()) if isinstance(v, Tensor) else v for key, v in settings.items()}
        return f"loss=fedveil.CrossEntropy({_spell(values)})"
    if form.ours == "huber" and settings:
        return f"loss=fedveil.Huber({settings['delta']!r}), a sum over outputs"
    if form.ours is None or settings:
        return None
    return f"loss={form.ours!r}" + ("" if form.exact else ", whose factor differs")


def _is_short(weight: object) -> bool:
    return not isinstance(weight, Tensor) or weight.numel() <= MOST_WEIGHTS


def _spell(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def _write(form: _Form, settings: Mapping[str, Any], reduction: str) -> str:
    """The loss as a function of outputs and targets, as one line of Python."""
    words = ["outputs", "targets.reshape(outputs.shape).to(outputs)" if form.alike else "targets"]
    for key, value in settings.items():
        if isinstance(value, Tensor):
            held = f"torch.tensor({value.tolist()!r})" if _is_short(value) else f"your_loss.{key}"
            value = f"{held}.to(outputs)"
        words.append(f"{key}={value if isinstance(value, str) else repr(value)}")
    made = f"torch.nn.functional.{form.function.__name__}({', '.join(words)}, reduction='none')"
    each = "sum" if reduction in ("sum", "batchmean") else "mean"
    return f"lambda outputs, targets: {made}.reshape(len(outputs), -1).{each}(1)"
