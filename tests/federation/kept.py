"""A small run, what may break it half-way, and how it should end."""

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fedveil.federation import Federation, checkpoint
from fedveil.models import mlp

ROUNDS, EVERY = 12, 4


LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def records_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


TEST = records_of(10, 9)


HOW = {"rounds": ROUNDS, "test": TEST, "evaluate_every": EVERY}


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(3, 2, hidden=4, layers=2)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def halving(optimizer):
    return StepLR(optimizer, 5, 0.5)


def make(optimizer=adam, schedule=halving, defence="plain", size=1.0):
    clients = [(inputs, size * targets) for inputs, targets in (records_of(12, 1), records_of(8, 2))]
    how = {"schedule": schedule, "schedule_every": "round", "batch_size": 4}
    return Federation(net(), clients, defence, optimizer, **how)


def round_in(folder, name=LAST):
    return checkpoint.load(folder / name)["round"]


def told(run):
    """The records but for the clock."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in run.history.records]


def equal(one, other):
    mine, others = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(value, others[name]) for name, value in mine.items())


def check_whole(folder, **how):
    """Resume what is in the folder; it must end as a run that nothing has happened to."""
    whole, again = make(**how), make(**how)
    whole.fit(**HOW)
    again.fit(**HOW, folder=folder, resume=True)
    assert equal(again, whole)
    assert told(again) == told(whole)
    assert [number for number, _ in again.history.curve("mse")] == list(range(EVERY, ROUNDS + 1, EVERY))
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    return again


def make_resumed(folder):
    run = make()
    run.resume(folder)
    return run


class HalfWay(torch.optim.SGD):
    """An optimiser whose fifth step is interrupted when the first parameter has moved, and its state with it."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 5:
            _, *others = [p for group in self.param_groups for p in group["params"]]
            kept = [p.grad for p in others]
            for parameter in others:
                parameter.grad = None
            super().step()
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient
            raise KeyboardInterrupt
        return super().step()


HalfWay.__name__ = torch.optim.SGD.__name__  # so that plain SGD may resume its run


def sgd(kind):
    return lambda parameters: kind(parameters, 1e-2, momentum=0.9)


class Plateau(ReduceLROnPlateau):
    """Its second step is interrupted when it has been made."""

    def step(self, metrics):
        super().step(metrics)
        if self.last_epoch == 2:
            raise KeyboardInterrupt


def impatient(kind):
    return lambda optimizer: kind(optimizer, patience=0, threshold=10.0)


def stop_at(number):
    def end(record):
        if record["round"] == number:
            raise KeyboardInterrupt

    return end
