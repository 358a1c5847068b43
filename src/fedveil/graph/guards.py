"""Check that a plan is valid for a batch whose size or form differs from the example's.

Forward may depend on the number of samples or on the length of a sequence. Sizes are compared with those of the
analysis at every step. For a new number of samples, forward runs on fake tensors at three sizes, and must perform the
same operations; otherwise, or for a new form, the model is analysed again, and the new plan must act in the same way.
"""

from weakref import WeakKeyDictionary

from torch import nn

from fedveil.errors import NotExact, NotTraceable
from fedveil.graph.analyse import make_plan
from fedveil.graph.build import Frozen
from fedveil.graph.export import SAMPLES
from fedveil.graph.inputs import Inputs, count, describe_form
from fedveil.graph.outputs import chosen_output, describe_output, find_original_of_view
from fedveil.graph.plan import Plan
from fedveil.graph.probe import agree, probe

SIZE_STEP = 97  # a prime: sizes that depend on the number of samples differ by a multiple of it, or nearly so
SIZES_FIX = "remove the code in forward that depends on sizes, or pad all inputs, and the example, to the same length"
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
        frozen: "local" if frozen parameters are neither perturbed nor sent.

    Raises:
        NotExact: the plan would differ.
    """
    batch_form, samples = describe_form(inputs), count(inputs)
    modes = tuple([module.training for module in model.modules()])
    key = batch_form, form, signature, modes, describe_output(chosen_output(model))
    checked = _CHECKED.setdefault(find_original_of_view(model), set())
    if (*key, samples) in checked:
        return
    if batch_form != form and key not in checked:
        plan = make_plan(model, inputs, SAMPLES, exposed=exposed, frozen=frozen)
        _compare(model, plan, signature, f"inputs {batch_form} than with {form}")
        checked.add(key)
    if not _has_same_operations(model, inputs, samples):
        plan = make_plan(model, inputs, samples, exposed=exposed, frozen=frozen)
        _compare(model, plan, signature, f"{samples} samples than with {SAMPLES}")
    checked.add((*key, samples))


def _compare(model: nn.Module, plan: Plan, signature: str, sizes: str) -> None:
    if plan.signature != signature:
        message = f"its forward method behaves differently with {sizes}, for which the model was analysed"
        raise NotExact(type(model).__name__, message, SIZES_FIX)


def _has_same_operations(model: nn.Module, inputs: Inputs, samples: int) -> bool:
    """Return whether forward performs the same operations with this number of samples as in the analysis."""
    if samples == SAMPLES:
        return True
    larger = samples + SIZE_STEP
    try:
        analysed_pass, larger_pass, current = (probe(model, inputs, size) for size in (SAMPLES, larger, samples))
    except NotTraceable:
        return False
    return agree(analysed_pass, larger_pass, larger - SAMPLES) and agree(larger_pass, current, SIZE_STEP)
