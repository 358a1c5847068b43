"""The page on protections has the figures of the committed results, and so has its chart."""

import json

from benchmarks.protections.chart import draw
from benchmarks.protections.summary import overview, write_tables
from tests.docs.markdown import ROOT

RESULTS = json.loads((ROOT / "results" / "protections" / "results.json").read_text())
PAGE = (ROOT / "docs" / "protections.md").read_text()


def test_tables_and_chart_are_drawn_from_the_results():
    assert (ROOT / "results" / "protections" / "results.md").read_text() == write_tables(RESULTS)
    assert (ROOT / "docs" / "images" / "protections.svg").read_text() == draw(RESULTS)


def test_the_table_and_the_figures_in_the_text_are_those_of_the_results():
    digits, bank = (RESULTS["data"][name] for name in ("digits", "bank"))
    assert "\n".join(overview(digits)) in PAGE
    lost = [own["rows"]["none"]["metric"][0] - own["rows"]["DP 3"]["metric"][0] for own in (digits, bank)]
    guesses = [100 * own["rows"]["veil"]["copy"]["constant"][0] for own in (digits, bank)]
    text = " ".join(PAGE.split())
    assert f"{100 * lost[0]:.1f} points of accuracy on digits, {lost[1]:.3f} of AUC on bank" in text
    assert f"Guessing is right {guesses[0]:.0f} % of the time. The second figure" in text
    assert f'Always answering "no" agrees with the server {guesses[1]:.0f} % of the time' in text
    assert f"with {digits['settings']['batch']} records per organisation?" in text
    assert f"and {bank['settings']['batch']} per organisation and round" in text
    assert f"{RESULTS['seconds'] / 60:.0f} minutes of CPU time" in text
