"""The demo: equal accuracy, an exact gradient, and a client whose copy is near chance."""

import re

from fedveil.studies import demo
from fedveil.studies.study import gather, publish


def test_the_demo_shows_equal_accuracy_a_small_error_and_a_client_near_chance(tmp_path):
    asked = demo.Demo(epochs=12)
    results = gather(demo.DEMO, asked, tmp_path, workers=1)
    shown = publish(demo.DEMO, asked, results, tmp_path, "fedveil demo")
    accuracy = {name: float(value.rstrip("%")) / 100 for name, value, _ in shown.rows}
    veiled, baseline = (abs(accuracy["plain"] - accuracy[name]) for name in ("veiled", "rounding baseline"))
    assert veiled <= max(baseline, 1 / 359) + 1e-3  # printed to a tenth of a percent
    assert accuracy["plain"] > 0.8
    assert accuracy["as received by a client"] < 0.35
    assert accuracy["offset removed (no data needed)"] > 0.6
    assert abs(accuracy["two broadcasts (no data needed)"] - accuracy["veiled"]) < 0.02  # one more round of training
    assert len(results["veiled"].errors) == 9  # one epoch
    error = float(re.search(r"on the true model: ([\de.-]+\d)", shown.note).group(1))
    assert 0 < error < 1e-5
    assert [part.title for part in shown.top_sections[0].parts] == ["the server's model", "as received by a client"]
