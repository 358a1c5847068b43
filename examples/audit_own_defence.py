# %% [markdown]
"""# Audit your own defence: it looks safe, but it is not.

- Shows: a defence in forty lines that loses no accuracy, and its result in `fedveil audit`.
- Who attacks: a client. Published attacks use the model as received; adaptive ones first try to remove the noise.
- Needs: `pip install fedveil`
- Last line: `the model: LEAK`
"""

# %%
import copy
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import fedveil
from fedveil.defences import DefenceRound, Plain, Samples
from fedveil.defences.plain import PlainClient, PlainServer, PlainUpdate, average
from fedveil.runs.settings import configure
from fedveil.studies.attack import AttackRequest
from fedveil.studies.audit.run import AUDIT, AuditOptions
from fedveil.studies.study import gather, publish

# %% [markdown]
"""## The defence

In every round the server draws a public direction *r* and a secret number *s*, and adds *s r* to the bias of the last
layer. The model that clients receive predicts only one or two classes, whatever the image. For squared error, a
client's gradient on that network is the true gradient plus *s* times the gradient of the outputs along *r*. It sends
both, and the server subtracts *s* times the latter, so the model is trained as if there were no defence.
"""


# %%
class Shifted(Plain):
    """A defence that adds a secret multiple of a public direction to the outputs.

    It supports only squared error, and clients in one process.
    """

    linear = False  # updates have two parts, which secure aggregation cannot add up

    def server(self, model, example, loss):
        """Prepare the server for a run."""
        return _Server(model)

    def client(self, model, example, loss):
        """Prepare clients for a run."""
        return _Client(model, loss)


class _Server(PlainServer):  # shifts the outputs of each broadcast by a new secret number
    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "_Round":
        network, secret = copy.deepcopy(model), secrets.SystemRandom().gauss(0, 100)
        network.direction = torch.randn_like(network[-1].bias)
        network[-1].bias.data += secret * network.direction
        return _Round(network, secret)


class _Client(PlainClient):  # sends the gradient of its loss, and the gradient of its outputs along the direction
    def step(self, broadcast: nn.Module, samples: Samples, client: int = 0) -> tuple:
        update, outputs = super().step(broadcast, samples), broadcast(samples.inputs)
        share = 1 / len(outputs) if samples.weights is None else samples.weights[:, None]
        along = torch.autograd.grad((share * outputs * broadcast.direction).sum(), broadcast.parameters())
        return update, PlainUpdate(dict(zip(update.gradients, along, strict=True)), {})


class _Round(DefenceRound):  # subtracts the effect of the shift
    def __init__(self, broadcast: nn.Module, secret: float) -> None:
        self.broadcast, self._secret = broadcast, secret

    def recover(self, updates: Sequence[tuple], weights: Sequence[float]) -> fedveil.Aggregate:
        seen, along = (average(part, weights, {}) for part in zip(*updates, strict=True))
        true = {name: seen.gradients[name] - self._secret * along.gradients[name] for name in seen.gradients}
        return fedveil.Aggregate(true, seen.buffers, seen.error)


# %% [markdown]
"""## The audit

The audit trains one federation with the defence and one without, takes the role of a client, and attacks. The attackers
were not written for `Shifted`: *broadcasts averaged* takes the mean of six broadcasts, and *outputs calibrated* fits an
affine map of the outputs to the client's own labels. On the command line, with the class in `my_module.py`, run
`fedveil audit --data digits --train-size 300 --clients 2 --loss squared_error --defence my_module:Shifted`.
"""

# %%
values = {"data": "digits", "train_size": 300, "clients": 2, "epochs": 60, "loss": "squared_error"}
request = AttackRequest(configure(values), (f"{__name__}:Shifted",), AuditOptions(trials=5, server=False))
with tempfile.TemporaryDirectory() as folder:
    results = gather(AUDIT, request, Path(folder), workers=1)
    shown = publish(AUDIT, request, results, Path(folder), "this script")  # report.html, with every table
found = results[f"{__name__}:Shifted"].attackers
for attacker, figures in {**found, "(undefended)": results["undefended"].attackers["as published"]}.items():
    share = figures.agreement.value
    print(f"{attacker:20} agrees with the server's model on {100 * share:5.1f} % {'█' * round(30 * share)}")

# %% [markdown]
"""## The verdict

The strongest attacker determines the verdict. A published attack near chance proves nothing, because it does not try to
remove the noise. `examples/own_defence` contains the same defence as a package, with an attacker written for it;
`docs/audit.md` explains how to read an audit.
"""

# %%
verdict, words = shown.first
print(words.paragraphs[0])
print(f"{verdict.header[1]}: {verdict.rows[0][1]}")
