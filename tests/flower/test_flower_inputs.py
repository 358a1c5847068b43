"""Clients on Flower whose models take more than one tensor."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.federation.test_local import words
from tests.federation.test_positions import draw, pixelwise
from tests.flower.test_flower_server import in_engine, on_flower, values
from tests.forms import FORMS, Words, network, records, reformed
from tests.oracle import built, worst

from fedveil.errors import TooFewAnswers


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
    server = on_flower(defence, data, lambda: network(kind), rounds=3, batch_size=8)
    if defence in ("plain", "veil"):
        engine = in_engine("plain", data, lambda: network(kind), rounds=3, batch_size=8)
        assert worst(values(server.model), values(engine.model)) < 1e-9
    assert [record["answers"] for record in server.history.records] == [3] * 3
    messages = server.engine.transport.grid.sent
    sent = b"".join(a.data for m in messages for r in m.content.array_records.values() for a in r.values())
    assert records((10, 14, 9))[0][0][0, :2].numpy().tobytes() not in sent


def test_token_ids_stay_whole_and_numbers_take_the_models_dtype():
    def single():
        return built(Words, dtype=torch.float32)

    data = words((5, 9))
    short = [({"ids": x["ids"], "numbers": x["numbers"].float()}, y) for x, y in data]
    options = {"loss": "cross_entropy", "batch_size": 8}
    server = on_flower("plain", data, single, example=short[0][0], **options)
    assert worst(values(server.model), values(in_engine("plain", short, single, **options).model)) < 1e-5


def test_a_class_at_each_pixel_trains_as_in_one_process():
    data = [(draw(n, 2, 4, 5), draw(n, 4, 5, classes=3)) for n in (6, 9)]
    runs = (run("plain", data, lambda: built(pixelwise(3)), loss="cross_entropy") for run in (on_flower, in_engine))
    assert worst(*[values(run.model) for run in runs]) < 1e-12


def test_a_client_whose_records_are_broken_is_named():
    inputs = {"a": torch.zeros(4, 2).double(), "b": torch.full((4, 4), torch.nan).double()}
    good = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    data = [(good, torch.zeros(4, 4).double()), (inputs, torch.zeros(4, 4).double())]
    with pytest.raises(TooFewAnswers, match="this client: its records cannot be used; its own log says why"):
        on_flower("plain", data, lambda: network(FORMS["dict"][0]), attempts=1, min_answers=2)
