"""`fedveil reproduce`: the whole of it at the quick scale, plans against the paper, and what happens to failures."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from tests.studies.page_numbers import numbers_of

import fedveil
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import ATTACKERS
from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.report import Intervals
from fedveil.runs.config import configure
from fedveil.studies.paper import table1
from fedveil.studies.paper.attack_tables import PaperValues
from fedveil.studies.paper.plan import SCALES, Scale, read_plan
from fedveil.studies.paper.reproduce import EXHIBITS, has_failure, read_exhibit, reproduce, select_names
from fedveil.studies.paper.table2 import PaperValues as PaperValues2
from fedveil.studies.paper.training import (
    Comparison,
    Run,
    compare_runs,
    defence_name,
    format_runs,
    list_configs,
    run_name,
    training_graph,
)
from fedveil.studies.study import run_graph

COMMITTED = Path(__file__).parents[2] / "results" / "cpu"
DEFENCES = ("plain", "ppdl", "dbcl", "spn", "veil")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    reproduce(["all"], "quick", folder, workers=1)
    return folder


@pytest.mark.slow
def test_all_of_the_paper_at_the_quick_scale(quick):
    page = (quick / "report.html").read_text()
    for name in EXHIBITS:
        plan = read_plan(name, "quick")
        found = read_exhibit(plan, quick)
        assert not has_failure(found["results"]), name
        assert plan.title in page
        assert found["command"] in page
    assert page.count("data:image/png") > 100


@pytest.mark.slow
def test_a_table_that_is_there_is_not_computed_again(quick, capsys):
    before = {path: path.stat().st_mtime_ns for path in quick.glob("*.json")}
    assert main(["reproduce", "all", "--out", str(quick)]) == 0
    assert {path: path.stat().st_mtime_ns for path in quick.glob("*.json")} == before
    printed = capsys.readouterr().out
    assert all(read_plan(name, "quick").title in printed for name in EXHIBITS)


@pytest.mark.slow
def test_a_table_of_another_version_is_computed_again_and_a_published_one_is_kept(quick, tmp_path, capsys):
    before = {name: (quick / name).read_text() for name in ("table1.json", "report.html")}
    found = json.loads(before["table1.json"])
    assert found["basis"] == {"version": fedveil.__version__}  # embedded data come with it
    (quick / "table1.json").write_text(json.dumps({**found, "basis": {"version": "0.0.0"}}))
    assert main(["reproduce", "table1", "--out", str(quick)]) == 0
    assert f"table1: computed again: fedveil 0.0.0 is now {fedveil.__version__}" in capsys.readouterr().err
    assert json.loads((quick / "table1.json").read_text())["basis"] == found["basis"]
    for name, text in before.items():  # as other tests found them
        (quick / name).write_text(text)
    published = {name: value for name, value in found.items() if name != "basis"}
    (tmp_path / "table1.json").write_text(json.dumps(published))
    assert main(["reproduce", "table1", "--out", str(tmp_path)]) == 0
    assert "table1: kept" in capsys.readouterr().err
    assert json.loads((tmp_path / "table1.json").read_text()) == published


@pytest.mark.slow
def test_the_page_is_built_from_the_data_alone(quick, tmp_path):
    for path in quick.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    reproduce(["all"], "quick", tmp_path)
    ours, theirs = ((place / "report.html").read_text() for place in (tmp_path, quick))
    assert ours.replace(str(tmp_path), str(quick)) == theirs
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_veil_and_plain_agree_at_the_quick_scale(quick):
    plan = read_plan("table1", "quick")
    results = TypeAdapter(list[Run]).validate_python(read_exhibit(plan, quick)["results"])
    pairs = list(compare_runs(results, ("layers", "clients")))
    assert len(pairs) == 9
    assert max(one.largest / max(one.plain) for one in pairs) < 1e-4  # float32 and a few dozen steps


@pytest.mark.slow
def test_tables_3_and_4_have_all_attackers(quick):
    for name in ("table3", "table4"):
        plan = read_plan(name, "quick")
        shown = EXHIBITS[name].present(plan, read_exhibit(plan, quick)["results"])
        veiled = [row for row in shown.rows if row[2] == "veil" and row[1].startswith("ASR")]
        assert {row[3] for row in veiled} >= {PUBLISHED, *ATTACKERS["veil"].strongest}
        assert all(re.match(r"\d", cell) for row in veiled for cell in row[5:])
        assert {bool(re.match(r"\d", row[4])) for row in veiled if row[3] == PUBLISHED} == {True}
        [chart] = [section for section in shown.sections if isinstance(section, Intervals)]
        attackers = {f"ours, {row[3]}" for row in shown.rows if row[1].startswith("ASR")}
        assert {mark.name for mark in chart.rows} == {"paper", *attackers}


@pytest.mark.slow
def test_table_2_has_the_baseline_beside_the_veil(quick):
    plan = read_plan("table2", "quick")
    *tables, words = EXHIBITS["table2"].present(plan, read_exhibit(plan, quick)["results"]).sections
    assert len(tables) == 2  # one for each loss
    rows = [dict(zip(table.header, row, strict=True)) for table in tables for row in table.rows]
    means = [(row["network"], row["difference of means"]) for row in rows]
    assert {net for net, cell in means if re.fullmatch(r"[\d.]+ \([\d.]+\)", cell)} == {"resnet20"}
    assert {net for net, cell in means if re.fullmatch(r"[\d.]+", cell)} == {"resnet32", "resnet56"}
    assert all("The baseline" in paragraph for paragraph in words.paragraphs)


def test_ranges_overlap_where_they_meet():
    def apart(plain, other):
        return Comparison({}, plain, other, 0.0, 0.0)

    assert apart([0.0, 2.0], [2.5, 4.5]).overlap  # 1 ± 1.41 and 3.5 ± 1.41
    assert not apart([0.0, 2.0], [4.0, 6.0]).overlap
    assert not apart([1.0, 1.0], [1.1, 1.1]).overlap


@pytest.mark.slow
def test_results_hold_no_secret_and_no_place_of_this_machine(quick):
    for path in quick.glob("*.json"):
        found = json.loads(path.read_text())
        assert str(quick) not in json.dumps(found["results"]), path.name


@pytest.mark.parametrize("name", EXHIBITS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_plan_describes_runs_that_can_be_configured(name, scale):
    plan = read_plan(name, scale)
    assert plan.settings.about
    assert plan.why
    if name in ("table1", "table2", "fig3"):
        assert list_configs(plan)
    elif name == "fig5":
        configure(plan.settings.run)
    else:
        assert all(configure(group) for group in plan.settings.runs)


def test_committed_results_load_and_the_page_is_theirs(tmp_path):
    for name in EXHIBITS:
        found = read_exhibit(read_plan(name, "cpu"), COMMITTED)
        assert found, f"{name}.json was made with other settings than {name}.toml has now"
        assert not has_failure(found["results"])
        (tmp_path / f"{name}.json").write_text((COMMITTED / f"{name}.json").read_text())
    reproduce(["all"], "cpu", tmp_path)
    built = (tmp_path / "report.html").read_text().replace(str(tmp_path), "results/cpu")
    assert built == (COMMITTED / "report.html").read_text()


def test_the_figures_of_the_committed_page_are_those_of_the_first_one():
    """Of the page that was built when all but tables 3 and 4 was computed, before names and forms changed."""
    before = Path(__file__).with_name("cpu_numbers.txt").read_text().splitlines()
    now = numbers_of((COMMITTED / "report.html").read_text())
    assert len(before) == 21
    for table in before:
        assert table in now


def test_figures_in_the_documentation_are_those_of_the_page():
    page = (COMMITTED / "report.html").read_text()
    text = (COMMITTED.parents[1] / "docs" / "reproduce.md").read_text()
    rows = [line.split("|")[2:4] for line in text.splitlines() if re.match(r"\| (Table|Figure) \d", line)]
    assert len(rows) == 5
    for paper, ours in rows:
        figures = re.findall(r"\d+\.\d+(?:e-\d+)?", paper + ours)
        assert all(re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", page) for figure in figures), (paper, ours)


def test_the_papers_values_are_all_there():
    one = read_plan("table1", "cpu").paper_values(table1.PaperValues)
    assert sum(len(row) for name in DEFENCES for row in one[name].values()) == 45
    assert table1.largest_gap(one) == pytest.approx(0.011)
    two = read_plan("table2", "cpu").paper_values(PaperValues2)
    assert sum(len(row) for data in ("LDC", "CIFAR10") for name in DEFENCES for row in two[data][name].values()) == 90
    for table, measures in (("table3", 5), ("table4", 4)):
        values = read_plan(table, "cpu").paper_values(PaperValues)
        assert {len(values[data]) for data in ("LDC", "CIFAR10")} == {measures}
        assert {tuple(row) for data in values.values() for row in data.values()} == {DEFENCES}


def test_the_cpu_scale_is_what_was_asked_for():
    runs = list_configs(read_plan("table1", "cpu"))
    assert len(runs) == 45 * 3
    assert {(run.training.epochs, run.training.batch_size, run.data.train_size) for run in runs} == {(100, 512, None)}
    wide = [run for run in list_configs(read_plan("table2", "cpu")) if run.model.name == "resnet20"]
    assert {run.model.width for run in wide} == {16}
    both = {(run.training.loss, defence_name(run)) for run in wide}
    assert both >= set(itertools.product(("squared_error", "cross_entropy"), ("plain", "veil", "baseline")))
    assert {run.data.clients * run.training.batch_size for run in wide} == {40}
    assert len({run.training.seed for run in list_configs(read_plan("fig3", "cpu"))}) == 5
    assert read_plan("table3", "cpu").settings.seeds == read_plan("table4", "cpu").settings.seeds == 3


def test_figure_3_takes_its_runs_from_table_2_where_they_are_the_same():
    table, figure = (set(map(run_name, list_configs(read_plan(name, "quick")))) for name in ("table2", "fig3"))
    assert figure <= table


def test_groups_share_what_is_common_and_values_follow_others():
    settings = {
        "about": "made up",
        "common": {"clients": [1, 5], "batch_size": {"of": "clients", "1": 40, "5": 8}, "seeds": 2, "lr": 1e-2},
        "runs": [{"defence": ["plain", "veil"], "lr": 2e-2}, {"defence": "plain", "rounding": 1, "seeds": 1}],
    }
    found = list_configs(dataclasses.replace(read_plan("table2", "quick"), settings=Scale(**settings)))
    assert len(found) == 2 * 2 * 2 + 2
    assert {(run.data.clients, run.training.batch_size) for run in found} == {(1, 40), (5, 8)}
    assert {(run.training.lr, run.defence.settings, defence_name(run)) for run in found} == {
        (2e-2, (), "plain"),
        (2e-2, (), "veil"),
        (1e-2, ("rounding=1",), "baseline"),
    }


def test_a_failed_cell_is_shown_as_failed(tmp_path):
    plan = read_plan("table1", "quick")
    group = {**plan.settings.runs[0], "layers": 3, "clients": [1, 400], "defence": ["plain", "veil"], "seeds": 1}
    plan = dataclasses.replace(plan, settings=plan.settings.model_copy(update={"runs": [group]}))
    results = run_graph(training_graph(plan, tmp_path), tmp_path, workers=1)
    assert [bool(result.failed) for result in results] == [False, False, True, True]
    assert format_runs(results[2:], ".3f").startswith("failed: ")
    moved = [dataclasses.replace(result, clients=10 if result.failed else 1) for result in results]
    shown = table1.present(plan, moved)
    found = {tuple(row[:2]): row[3] for row in shown.rows}
    assert re.match(r"\d", found["veil", "1"])
    assert found["veil", "10"].startswith("failed: ")


def test_missing_data_are_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "none"))
    with pytest.raises(BadArgument, match="bank"):
        reproduce(["table1"], "cpu", tmp_path / "out", workers=1)
    assert not list((tmp_path / "out").glob("**/*.json"))


def test_unknown_names_and_scales_are_refused(tmp_path):
    assert select_names(["fig5", "table1"]) == ["table1", "fig5"]
    with pytest.raises(BadArgument, match="table9"):
        select_names(["table9"])
    with pytest.raises(BadArgument, match="huge"):
        read_plan("table1", "huge")
