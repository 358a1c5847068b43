"""A small run, what may break it half-way, and how it should end."""

import torch
from tests.small import Records, adam, federation, pairs
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fedveil.federation import checkpoint

ROUNDS, EVERY = 12, 4
LAST, PREVIOUS = checkpoint.LAST, checkpoint.PREVIOUS
TEST = pairs(10, seed=9)[0]
HOW = {"rounds": ROUNDS, "test": TEST, "evaluate_every": EVERY}


def halving(optimizer):
    return StepLR(optimizer, 5, 0.5)


def make(optimizer=adam, schedule=halving, defence=None, size=1.0):
    return federation(defence, optimizer, size=size, schedule=schedule, schedule_every="round")


def make_resumed(folder, **how):
    run = make(**how)
    run.resume(folder)
    return run


def round_in(folder, name=LAST):
    return checkpoint.load(folder / name)["round"] if (folder / name).exists() else 0


def told(run):
    """The records but for the clock."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in run.history.records]


def equal(one, other):
    mine, others = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(value, others[name]) for name, value in mine.items())


def check_whole(folder, **how):
    """Resume the run in the folder; it must end like a run that was not interrupted."""
    whole, again = make(**how), make(**how)
    whole.fit(**HOW)
    again.fit(**HOW, folder=folder, resume=True)
    assert equal(again, whole)
    assert told(again) == told(whole)
    assert [number for number, _ in again.history.curve("mse")] == list(range(EVERY, ROUNDS + 1, EVERY))
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def stop_at(number, error=KeyboardInterrupt):
    def end(record):
        if record["round"] == number:
            raise error

    return end


class HalfWay(torch.optim.SGD):
    """An optimizer whose fifth step is interrupted when the first parameter has moved, and its state with it."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 5:
            for parameter in self.param_groups[0]["params"][1:]:
                parameter.grad = None
            super().step()
            raise KeyboardInterrupt
        return super().step()


class Stubborn(HalfWay):
    """Its first restoration is interrupted, too."""

    restored = 0

    def load_state_dict(self, state_dict):
        self.restored += 1
        if self.restored == 1:
            raise KeyboardInterrupt
        super().load_state_dict(state_dict)


for kind in (HalfWay, Stubborn):
    kind.__name__ = torch.optim.SGD.__name__  # so that plain SGD may resume its run


def sgd(kind=torch.optim.SGD):
    return lambda parameters: kind(parameters, 1e-2, momentum=0.9)


class Struck(StepLR):
    """A schedule whose sixth step is interrupted when it has been made."""

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == 6:
            raise KeyboardInterrupt


class Plateau(ReduceLROnPlateau):
    """Its second step is interrupted when it has been made."""

    def step(self, metrics):
        super().step(metrics)
        if self.last_epoch == 2:
            raise KeyboardInterrupt


def impatient(kind):
    return lambda optimizer: kind(optimizer, patience=0, threshold=10.0)


class Interrupted(Records):
    """Test data whose reading is interrupted after some records."""

    def __init__(self, reads):
        super().__init__(*TEST)
        self.reads = reads

    def __getitem__(self, row):
        if self.read + 1 == self.reads:
            raise KeyboardInterrupt
        return super().__getitem__(row)
