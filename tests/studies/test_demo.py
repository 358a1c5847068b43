"""The product's first impression keeps its word."""

import re

import torch
from tests.oracle import built
from tests.sessions import Session

from fedveil.defences import Samples
from fedveil.models import mlp
from fedveil.studies import demo
from fedveil.studies.study import gather, publish


def test_the_demo_shows_equal_accuracy_a_small_error_and_a_client_near_chance(tmp_path):
    asked = demo.Demo(epochs=12)
    shown = publish(demo.DEMO, asked, gather(demo.DEMO, asked, tmp_path, workers=1), tmp_path, "make demo")
    share = {name: float(value.rstrip("%")) / 100 for name, value, _ in shown.rows}
    baseline = abs(share["plain"] - share["rounding baseline"])
    assert abs(share["plain"] - share["veiled"]) <= max(baseline, 1 / 359) + 1e-3  # printed to a tenth of a percent
    assert share["plain"] > 0.8
    assert share["as received by a client"] < 0.35
    assert share["offset removed (no data needed)"] > 0.6
    assert abs(share["two broadcasts (no data needed)"] - share["veiled"]) < 0.02  # one more round of training
    error = float(re.search(r"Largest relative error of a recovered gradient: ([\de.-]+\d)", shown.note).group(1))
    assert error < 1e-5
    assert [part.title for part in shown.first[0].parts] == ["the server's model", "as received by a client"]


def watched_rounds(model, inputs):
    watched = demo.CheckedVeil(1.0)
    targets = torch.zeros(len(inputs), 10)
    session = Session(watched, model, inputs)
    for _ in range(30):
        update = session.step(session.broadcast(), Samples(inputs, targets))
        session.recover([update])
    assert watched.flips + len(watched.errors) == 30
    return watched


def test_a_relu_that_rounding_moves_is_counted_apart():
    model = built(lambda: mlp(20, 10, layers=1, hidden=8), dtype=torch.float32)
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    edge, bias = model[0].weight[0].detach().double(), model[0].bias[0].detach().double()
    away = (inputs.double() @ edge + bias) / edge.norm() ** 2
    on_the_edge = (inputs.double() - away[:, None] * edge).float()  # of one unit, but for rounding, whatever the CPU
    assert watched_rounds(model, on_the_edge).flips > 0
    beside = (inputs.double() + (1 - away)[:, None] * edge).float()[:2]
    calm = watched_rounds(model, beside)
    assert calm.flips == 0
    assert max(calm.errors) < 1e-5
