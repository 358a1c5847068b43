"""The product's first impression keeps its word."""

import contextlib
import re

import torch
from tests.oracle import built

from fedveil.models import mlp
from fedveil.scheme import SquaredError
from fedveil.studies import demo


class Silent:
    def show(self, record):
        pass


def test_the_demo_shows_equal_accuracy_a_small_error_and_a_client_near_chance(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 12)
    text = "\n".join(demo.run_comparison(tmp_path, lambda epochs, label: contextlib.nullcontext(Silent())))
    share = {
        name.strip(): float(value) / 100 for name, value in re.findall(r"^  (\D+?) +([\d.]+)%", text, re.MULTILINE)
    }
    control = abs(share["plain"] - share["rounding control"])
    assert abs(share["plain"] - share["veiled"]) <= max(control, 1 / 359) + 1e-3  # printed to a tenth of a percent
    assert share["plain"] > 0.8
    assert share["as a client is sent it"] < 0.35
    assert share["centred by a client that thinks"] > 0.6
    error = float(re.search(r"largest relative error of a recovered gradient: (\S+)", text).group(1))
    assert error < 1e-5
    assert "no guarantee" in text
    page = (tmp_path / "report.html").read_text()
    assert "Test accuracy" in page
    assert "What is and is not protected" in page


def watched_rounds(model, inputs):
    watched = demo.Watched(1.0)
    targets = torch.zeros(len(inputs), 10)
    watched.prepare(model, inputs, SquaredError())
    for _ in range(30):
        update = watched.client_step(model, watched.broadcast(model), inputs, targets, None)
        watched.aggregate([update], [1.0])
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
