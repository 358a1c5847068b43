"""Clients on Flower whose models take more than one tensor."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.federation.test_local import words
from tests.federation.test_positions import draw, pixelwise
from tests.flower.grid import LocalGrid
from tests.flower.test_flower_server import app_of, values
from tests.forms import FORMS, Words, network, records, reformed
from tests.oracle import built, worst

from fedveil.errors import TooFewAnswers
from fedveil.federation import Federation
from fedveil.federation.evaluate import slice_inputs
from fedveil.flower import Server

ROUNDS = 3


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def on_flower(build, data, defence, **options):
    grid = LocalGrid(app_of(data, build), len(data))
    server = Server(
        grid,
        build(),
        slice_inputs(data[0][0], 0, 2),
        defence,
        sgd,
        batch_size=8,
        **{"loss": "squared_error", **options},
    )
    server.fit(rounds=ROUNDS, test=data[0])
    return grid, server


def in_engine(build, data, **options):
    federation = Federation(
        build(), data, "plain", sgd, batch_size=8, whole_shard=True, **{"loss": "squared_error", **options}
    )
    federation.fit(rounds=ROUNDS, test=data[0])
    return federation


@pytest.mark.parametrize(
    ("defence", "form"),
    [
        *[("plain", "tuple"), ("plain", "dict"), ("plain", "nested")],
        *[("veil", "tuple"), ("veil", "dict"), ("spn", "dict"), ("dbcl", "tuple")],
    ],
)
def test_every_form_travels_nowhere_and_trains_as_in_one_process(defence, form):
    kind, change = FORMS[form]
    data = reformed(records((10, 14, 9), classes=True), change)
    grid, server = on_flower(lambda: network(kind), data, defence)
    if defence in ("plain", "veil"):
        engine = in_engine(lambda: network(kind), data)
        assert worst(values(server.model), values(engine.model)) < 1e-9
        assert server.history.last["accuracy"] == engine.history.last["accuracy"]
    assert [record["answers"] for record in server.history.records] == [3] * ROUNDS
    sent = b"".join(a.data for m in grid.sent for r in m.content.array_records.values() for a in r.values())
    assert records((10, 14, 9))[0][0][0, :2].numpy().tobytes() not in sent


def test_token_ids_stay_whole_and_numbers_take_the_models_dtype():
    def single():
        return built(Words, dtype=torch.float32)

    data = words((5, 9))
    short = [({"ids": x["ids"], "numbers": x["numbers"].float()}, y) for x, y in data]
    server = Server(
        LocalGrid(app_of(data, single), 2), single(), short[0][0], "plain", sgd, loss="cross_entropy", batch_size=8
    )
    server.fit(rounds=ROUNDS)
    engine = in_engine(single, short, loss="cross_entropy")
    assert worst(values(server.model), values(engine.model)) < 1e-5


def test_a_class_at_each_pixel_trains_as_in_one_process():
    data = [(draw(n, 2, 4, 5), draw(n, 4, 5, classes=3)) for n in (6, 9)]
    _, server = on_flower(lambda: built(pixelwise(3)), data, "plain", loss="cross_entropy")
    engine = in_engine(lambda: built(pixelwise(3)), data, loss="cross_entropy")
    assert worst(values(server.model), values(engine.model)) < 1e-12


def test_a_client_whose_records_are_broken_is_named():
    inputs = {"a": torch.zeros(4, 2).double(), "b": torch.full((4, 4), torch.nan).double()}
    good = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    data = [(good, torch.zeros(4, 4).double()), (inputs, torch.zeros(4, 4).double())]
    with pytest.raises(TooFewAnswers, match="this client: its records cannot be used; its own log says why"):
        on_flower(lambda: network(FORMS["dict"][0]), data, "plain", attempts=1, min_answers=2)
