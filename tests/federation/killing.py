"""A defence that kills its process, for runs that are killed at a round that is known."""

import os
import signal

from fedveil.defences import Plain


class Deadly(Plain):
    """Plain, until the exchange of which KILL_AFTER is the number in this process, from 1 on."""

    exchanges = 0

    def aggregate(self, updates, weights):
        self.exchanges += 1
        if str(self.exchanges) == os.environ.get("KILL_AFTER"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(updates, weights)
