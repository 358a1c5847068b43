"""The verdict at the top of pages of runs and of the paper: one sentence."""

import re
from pathlib import Path

import pytest
from tests.configs import config_of

from fedveil.runs import page as run_page
from fedveil.runs.folder import train
from fedveil.studies.paper.plan import read_plan
from fedveil.studies.paper.reproduce import EXHIBITS, join_verdicts, read_exhibit

COMMITTED = Path(__file__).parents[2] / "results" / "cpu"


def checked(said):
    """A verdict as it must be: one sentence of about 160 characters at most."""
    assert re.fullmatch(r"[A-Z].*[^.]\.", said), said
    assert not re.search(r"[.!?] [A-Z]", said), said
    assert len(said) <= 165, (len(said), said)
    return said


@pytest.mark.parametrize(
    ("views", "said"),
    [
        (
            (0.961, 0.111, 0.947),
            "has 11.1 % as received, but 94.7 % once the client removes the offset, without any data.",
        ),
        ((0.961, 0.111, 0.3), "has 11.1 % as received, 30.0 % without the offset; what two broadcasts reveal is not"),
        ((0.961, 0.961), "; clients receive a model that is about as good (96.1 %)."),
        ((0.961, 0.2), "has 20.0 % as received; what an adaptive client makes of it is not measured here."),
    ],
)
def test_a_run_says_what_clients_have_as_measured(views, said):
    found = dict(zip(("server", "received", "removed"), views, strict=False))
    assert said in checked(run_page.verdict("accuracy", found))
    assert checked(run_page.verdict("accuracy", found, " at epsilon 2.5")).startswith(
        "Test accuracy 96.1 % at epsilon 2.5;"
    )


def test_other_metrics_are_numbers():
    found = {"server": 0.0621, "received": 151.3, "removed": 0.0655}
    assert checked(run_page.verdict("mse", found)).startswith(
        "Test mse 0.0621; a client's copy of the model has 151 as"
    )


def test_the_page_of_a_run_has_its_own_figures(tmp_path):
    said = {}
    for epochs in (1, 20):
        small = {"data": "digits", "train_size": 100, "test_size": 100, "clients": 2, "hidden": 12, "lr": 0.02}
        summary = train(config_of(epochs=epochs, **small), tmp_path / str(epochs))
        page = (tmp_path / str(epochs) / "report.html").read_text()
        accuracy = f"test accuracy {100 * summary.metrics['accuracy']:.1f} %"
        assert f"<title>digits, mlp, veil: {accuracy} \N{EN DASH} Fedveil</title>" in page
        (said[epochs],) = re.findall('<meta name="description" content="(.*)">', page)
        assert checked(said[epochs].replace("&#39;", "'")).startswith(f"T{accuracy[1:]};")
    assert said[1] != said[20]


def test_the_page_of_the_paper_joins_cost_and_attacks():
    def made(*names):
        plans = {name: read_plan(name, "cpu") for name in names}
        files = {name: read_exhibit(plan, COMMITTED)["results"] for name, plan in plans.items()}
        return checked(join_verdicts({name: EXHIBITS[name].present(plans[name], files[name]) for name in names}))

    assert made("table2", "table3") == (
        "The veil ends within 1.80 points of plain accuracy (rounding alone: 1.45); membership attacks on cifar10 "
        "reach 82.0 % under it (adaptive: 86.7 %), 84.6 % without."
    )
    assert made("table1") == "The veil ends within 9.3e-04 of plain training's squared error."
    assert (
        made("table4") == "Inversion attacks on cifar10 reach 31.2 % under the veil (adaptive: 75.0 %), 75.8 % without."
    )
    assert made("fig3", "fig5") == (
        "The curves of veil and plain agree within their spread over seeds in 48 of 48 epochs; images from gradients "
        "have 11.3 dB under it, 17.3 dB without."
    )
    assert made("fig4") == "No verdict: nothing on this page has figures to judge."
