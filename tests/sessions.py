"""A defence in use without a federation."""

from fedveil.scheme import find_loss


class Session:
    """A defence's server and clients, and the round in progress."""

    def __init__(self, defence, model, example, loss="squared_error"):
        self.defence, self.model, loss = defence, model, find_loss(loss)
        self.server, self.client = defence.server(model, example, loss), defence.client(model, example, loss)
        self.upload, self.accumulate = self.client.upload, self.client.accumulate
        self.round = None

    def broadcast(self, model=None, members=None):
        self.round = self.server.start_round(self.model if model is None else model, members)
        return self.round.broadcast

    def step(self, broadcast, samples, client=0):
        return self.client.step(broadcast, samples, client)

    def recover(self, updates, weights=None):
        return self.round.recover(updates, [1.0] * len(updates) if weights is None else weights)

    def recover_each(self, updates):
        return self.round.recover_each(updates)

    def client_view(self, broadcast):
        return self.defence.client_view(self.model, broadcast)


def watch(run, look):
    """Have a federation call a function with each round of its defence, before clients are asked."""
    start = run.defence_server.start_round

    def start_round(*given):
        own = start(*given)
        look(own)
        return own

    run.defence_server.start_round = start_round
    return run
