"""Reconstruct inputs from their gradient: DLG, iDLG and Inverting Gradients.

All three search for inputs whose gradient is close to the leaked one. DLG (Zhu et al. 2019, arXiv 1906.08935) and iDLG
(Zhao et al. 2020, arXiv 2001.02610) minimise the squared distance with L-BFGS, which needs smooth activations.
Inverting Gradients (Geiping et al. 2020, arXiv 2003.14053) minimises

    1 - <g', g> / (|g'| |g|) + weight TV(x')

with Adam on the signs of the pixels' gradients. It keeps pixels within their range, and also works with ReLU.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.leaked_gradients import Gradients, Leak
from fedveil.attacks.similarity import total_variation
from fedveil.checks import check_choice, check_count
from fedveil.errors import BadArgument

LR_MILESTONES = (3 / 8, 5 / 8, 7 / 8)  # fractions of the steps after which lr drops tenfold
STOP_DISTANCE = 1e-6  # squared distance at which L-BFGS stops, as in iDLG
Progress = Callable[[float], None]  # called with the fraction completed
Box = tuple[Tensor, Tensor]  # the smallest and largest value of each channel
Distance = Callable[[Gradients, Mapping[str, Tensor], Mapping[str, Tensor] | None], Tensor]


@dataclass(frozen=True)
class Search:
    """Settings for a search."""

    method: str = "cosine"  # "dlg" also searches for labels; "idlg" and "cosine" need them
    steps: int = 800  # steps of Adam, or outer steps of L-BFGS with up to 20 evaluations each
    restarts: int = 2  # number of random starts; the result with the closest gradient is kept
    lr: float = 0.1  # learning rate of Adam; L-BFGS uses 1
    smooth: float = 1e-2  # weight of each image's total variation, for "cosine" only

    def __post_init__(self) -> None:
        check_choice("Search", "method", self.method, ("dlg", "idlg", "cosine"))
        check_count("Search", "steps", self.steps)
        check_count("Search", "restarts", self.restarts)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Reconstructed inputs, in arbitrary order since the true order is unknown, and their class indices."""

    inputs: Tensor
    labels: Tensor
    distance: float  # distance between the inputs' gradient and the leaked one; infinite if the search failed
    distances: tuple[float, ...] = ()  # distance reached by each restart


def squared_distance(gradients: Gradients, leaked: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None) -> Tensor:
    """Return the sum of squared differences over the elements that were received."""
    differences = [(gradient - leaked[name], name) for name, gradient in gradients.items()]
    return torch.stack(
        [(difference * mask[name] if mask else difference).square().sum() for difference, name in differences]
    ).sum()


def cosine_distance(gradients: Gradients, leaked: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None) -> Tensor:
    """Return 1 - <g', g> / (|g'| |g|), where g' and g contain the received elements of all parameters."""
    if mask:
        gradients = {name: gradient * mask[name] for name, gradient in gradients.items()}
        leaked = {name: gradient * mask[name] for name, gradient in leaked.items()}
    vector = torch.cat([gradient.flatten() for gradient in gradients.values()])
    leaked_vector = torch.cat([leaked[name].flatten() for name in gradients])
    return 1 - torch.nn.functional.cosine_similarity(vector, leaked_vector, dim=0)


def input_distance(leak: Leak, inputs: Tensor, targets: Tensor, method: Distance, *, graph: bool = False) -> Tensor:
    """Return the distance between the inputs' gradient and the leaked one; `leak.compare` takes precedence."""
    result = leak.gradients_of(inputs, targets, graph=graph)
    return leak.compare(result) if leak.compare else method(result, leak.gradients, leak.mask)


def reconstruct(
    leak: Leak,
    shape: tuple[int, ...],
    search: Search,
    *,
    classes: int,
    generator: torch.Generator,
    labels: Tensor | None = None,
    box: Box | None = None,
    progress: Progress = lambda fraction: None,
) -> Reconstruction:
    """Search for inputs whose gradient is close to the leaked one, and keep the restart with the smallest distance.

    `shape` is the shape of the inputs, whose first dimension indexes records. `generator`, on the CPU, draws the random
    starts. `labels` are class indices; "dlg" searches for labels itself. "cosine" stays within `box`, the smallest and
    largest value of each channel, both with shape (channels, 1, 1).
    """
    if (labels is None) != (search.method == "dlg"):
        verb = "needs" if labels is None else "does not accept"
        raise BadArgument("reconstruct", f"{search.method} {verb} labels")
    template = next(iter(leak.gradients.values()))
    candidates = []
    for restart in range(search.restarts):
        start = torch.randn(shape, generator=generator).to(template)
        logits = torch.randn((shape[0], classes), generator=generator).to(template)

        def report(fraction: float, completed: int = restart) -> None:
            progress((completed + fraction) / search.restarts)

        targets = logits if labels is None else labels
        if search.method == "cosine":
            candidates.append(search_by_signs(leak, start, targets, search, box, report))
        else:
            candidates.append(search_by_lbfgs(leak, start, targets, search, report))
    best = min(candidates, key=lambda result: result.distance)
    return dataclasses.replace(best, distances=tuple(result.distance for result in candidates))


def search_by_signs(
    leak: Leak, start: Tensor, labels: Tensor, search: Search, box: Box | None, progress: Progress
) -> Reconstruction:
    """Search with Adam on the signs of the pixels' gradients; lr drops tenfold after 3/8, 5/8 and 7/8 of the steps.

    Unlike in Inverting Gradients, the weight of the total variation is proportional to the batch size, so that each
    image is smoothed equally in batches of any size.
    """
    weight = search.smooth * len(start)
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], search.lr)
    milestones = [int(search.steps * fraction) for fraction in LR_MILESTONES]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
    for step in range(search.steps):
        distance = input_distance(leak, x, labels, cosine_distance, graph=True)
        (gradient,) = torch.autograd.grad(distance + weight * total_variation(x), x)
        x.grad = gradient.sign()
        optimizer.step()
        schedule.step()
        if box:
            with torch.no_grad():
                x.clamp_(*box)
        if step % 20 == 0:
            progress(step / search.steps)
    x = x.detach()
    final_distance = float(input_distance(leak, x, labels, cosine_distance))
    return Reconstruction(x, labels, final_distance if math.isfinite(final_distance) else math.inf)


def search_by_lbfgs(leak: Leak, start: Tensor, labels: Tensor, search: Search, progress: Progress) -> Reconstruction:
    """Minimise the squared distance with L-BFGS (torch's defaults); floating-point labels are logits and optimised too.

    The function returns the inputs with the smallest distance, because L-BFGS without a line search may move away from
    these inputs. The search stops if the smallest distance is below 1e-6, or if the distance no longer changes or is
    not finite.
    """
    x, has_logits = start.clone().requires_grad_(), labels.is_floating_point()
    y = labels.clone().requires_grad_(has_logits)
    variables = [x, y] if has_logits else [x]
    optimizer = torch.optim.LBFGS(variables)
    best_distance, inputs, best_labels = math.inf, x.detach().clone(), y.detach().clone()

    def closure() -> Tensor:
        nonlocal best_distance, inputs, best_labels
        distance = input_distance(leak, x, y.softmax(-1) if has_logits else y, squared_distance, graph=True)
        for variable, gradient in zip(variables, torch.autograd.grad(distance, variables), strict=True):
            variable.grad = gradient
        value = float(distance.detach())
        if value < best_distance:
            best_distance, inputs, best_labels = value, x.detach().clone(), y.detach().clone()
        return distance.detach()

    previous = math.inf
    for step in range(search.steps):
        current = float(optimizer.step(closure))  # type: ignore[no-untyped-call]
        if best_distance < STOP_DISTANCE or not math.isfinite(current) or current == previous:
            break
        previous = current
        progress(step / search.steps)
    return Reconstruction(inputs, best_labels.argmax(-1) if has_logits else best_labels, best_distance)
