"""Check that a plan holds for a batch whose size or form differs from the example's.

Forward may depend on the number of samples or on the length of a sequence. Sizes are compared with those of the
analysis at every step. For a new number of samples, forward runs on fake tensors at three sizes, and must perform the
same operations; otherwise, and for a new form, the model is analysed again, and the new plan must do the same.
"""

from weakref import WeakKeyDictionary

from torch import nn

from fedveil.errors import NotExact, NotTraceable
from fedveil.graph.analyse import make_plan
from fedveil.graph.build import Frozen
from fedveil.graph.export import SAMPLES
from fedveil.graph.inputs import Inputs, count, describe_form
from fedveil.graph.outputs import chosen_output, describe_output, find_viewed
from fedveil.graph.plan import Plan
from fedveil.graph.probe import agree, probe

FAR = 97  # a prime: sizes that depend on the number of samples differ by a multiple of it, or nearly so
ANALYSE = (
    "remove the code in forward that depends on sizes, or pad all inputs to one length and use that in the example"
)
_CHECKED: WeakKeyDictionary[nn.Module, set[tuple[object, ...]]] = WeakKeyDictionary()  # sizes that passed


def check_sizes(
    model: nn.Module, inputs: Inputs, form: str, signature: str, *, exposed: bool, frozen: Frozen = "sent"
) -> None:
    """Refuse a batch for which the model's plan would differ.

    Args:
        model: the model, in the mode in which it was analysed.
        inputs: a batch.
        form: the form of the inputs in the analysis.
        signature: the signature of the plan.
        exposed: whether the plan has no head.
        frozen: whether the plan leaves frozen parameters as they are ("local").

    Raises:
        NotExact: the plan would differ.
    """
    own, samples = describe_form(inputs), count(inputs)
    modes = tuple([module.training for module in model.modules()])
    key = own, form, signature, modes, describe_output(chosen_output(model))
    checked = _CHECKED.setdefault(find_viewed(model), set())
    if (*key, samples) in checked:
        return
    if own != form and key not in checked:
        found = make_plan(model, inputs, SAMPLES, exposed=exposed, frozen=frozen)
        _compare(model, found, signature, f"inputs {own} than with {form}")
        checked.add(key)
    if not _has_same_operations(model, inputs, samples):
        found = make_plan(model, inputs, samples, exposed=exposed, frozen=frozen)
        _compare(model, found, signature, f"{samples} samples than with {SAMPLES}")
    checked.add((*key, samples))


def _compare(model: nn.Module, plan: Plan, signature: str, sizes: str) -> None:
    if plan.signature != signature:
        what = f"its forward method behaves differently with {sizes}, for which the model was analysed"
        raise NotExact(type(model).__name__, what, ANALYSE)


def _has_same_operations(model: nn.Module, inputs: Inputs, samples: int) -> bool:
    """Return whether forward performs the same operations with this number of samples as in the analysis."""
    if samples == SAMPLES:
        return True
    far = samples + FAR
    try:
        analysed, distant, here = (probe(model, inputs, size) for size in (SAMPLES, far, samples))
    except NotTraceable:
        return False
    return agree(analysed, distant, far - SAMPLES) and agree(distant, here, FAR)
