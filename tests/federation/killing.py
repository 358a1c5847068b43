"""A defence that kills its process, for runs that are killed at a round that is known."""

import os
import signal

from fedveil.defences import Plain
from fedveil.defences.plain import PlainRound, PlainServer


class DeadlyRound(PlainRound):
    exchanges = 0

    def recover(self, updates, weights):
        DeadlyRound.exchanges += 1
        if str(DeadlyRound.exchanges) == os.environ.get("KILL_AFTER"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().recover(updates, weights)


class DeadlyServer(PlainServer):
    def start_round(self, model, members=None):
        return DeadlyRound(model, self.figures)


class Deadly(Plain):
    """Plain, until the exchange of which KILL_AFTER is the number in this process, from 1 on."""

    def server(self, model, example, loss):
        return DeadlyServer(model)
