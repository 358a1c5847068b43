"""Train a digit classifier with five clients who never see it, beside plain federated training.

Shows: recovered gradients equal plain ones in every round, so both models end up the same.
Who attacks: nobody yet; the last lines show what a client can read off the model it is sent.
Guarantee kept: recovery is lossless up to rounding. Simplified: one process, squared error on one-hot targets.
Last lines printed: test accuracy of both models, of the model as sent, and of the same model centred.
"""

import copy
import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedveil
from fedveil.models import mlp

CLIENTS, ROUNDS = 5, 400


def digits() -> tuple[Tensor, Tensor]:
    """Images in rows and their classes, in an order that is always the same."""
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(classes).long()[order]


def plain_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What plain training computes: half the squared distance, averaged over samples."""
    loss = 0.5 * (model(inputs) - targets).pow(2).sum(1).mean()
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> None:
    """One step of the server's optimiser."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()


def accuracy(model: nn.Module, inputs: Tensor, classes: Tensor) -> float:
    """Share of right answers."""
    return float((model(inputs).argmax(1) == classes).float().mean())


def main() -> None:
    """Train both models and compare them."""
    torch.manual_seed(0)
    images, classes = digits()
    targets = nn.functional.one_hot(classes, 10).float()
    train, test = slice(0, 1400), slice(1400, None)
    veiled = mlp(64, 10)
    plain = copy.deepcopy(veiled)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (plain, veiled)]
    plan = fedveil.analyse(veiled, images[:1])
    print(plan, end="\n\n")
    errors, started = [], time.perf_counter()
    for number in range(ROUNDS):
        batch = torch.randint(0, 1400, (160,), generator=torch.Generator().manual_seed(number))
        inputs, wanted = images[train][batch], targets[train][batch]
        secret = fedveil.draw_secret(plan, groups=10, additive=100.0)
        sent = fedveil.perturb(veiled, secret)
        updates = [fedveil.client_step(veiled, sent, inputs[k::CLIENTS], wanted[k::CLIENTS]) for k in range(CLIENTS)]
        recovered = fedveil.recover(secret, updates).gradients
        truth = plain_gradients(veiled, inputs, wanted)
        errors.append(max(float((recovered[name] - g).norm() / g.norm()) for name, g in truth.items()))
        step(veiled, optimizers[1], recovered)
        step(plain, optimizers[0], plain_gradients(plain, inputs, wanted))
    sent = fedveil.perturb(veiled, fedveil.draw_secret(plan, groups=10, additive=100.0))
    views = {
        "plain training": plain,
        "veiled training": veiled,
        "the model as a client is sent it": fedveil.client_view(veiled, sent),
        "the same, centred by a client that thinks": fedveil.client_view(veiled, sent, centred=True),
    }
    print(f"{ROUNDS} rounds, {CLIENTS} clients, digits, float32, noise 100: {time.perf_counter() - started:.1f} s")
    print(f"relative error of a recovered gradient (its worst parameter), over rounds: {statistics.median(errors):.0e}")
    print(
        f"in the median, {max(errors):.0e} at most (1e-3 where rounding moves a ReLU across 0, as plain rounding does)"
    )
    print("\ntest accuracy of")
    for name, model in views.items():
        print(f"  {name:<42} {accuracy(model, images[test], classes[test]):6.1%}")


if __name__ == "__main__":
    main()
