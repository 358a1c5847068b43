"""`fedveil reproduce`: all of it at the quick scale, the committed results, plans against the paper, and failures."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import fedveil
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate
from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.runs.settings import configure
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.attacks import AttackerResults, AttackScores, Membership
from fedveil.studies.paper import training
from fedveil.studies.paper.attack_tables import MEMBERSHIP_KIND, present_table3
from fedveil.studies.paper.plan import SCALES, ScaleSettings, read_plan
from fedveil.studies.paper.reproduce import EXHIBITS, has_failure, read_exhibit, reproduce, select_names
from fedveil.studies.paper.training import defence_name, list_configs, run_name
from fedveil.studies.study import run_graph

COMMITTED = Path(__file__).parents[2] / "results" / "cpu"
DEFENCES = ("plain", "ppdl", "dbcl", "spn", "veil")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    reproduce(["all"], "quick", folder, workers=1)
    return folder


def present(name, folder, scale="quick"):
    plan = read_plan(name, scale)
    return EXHIBITS[name].present(plan, read_exhibit(plan, folder)["results"])


@pytest.mark.slow
def test_all_of_the_paper_at_the_quick_scale(quick, tmp_path, capsys):
    page = (quick / "report.html").read_text()
    for name in EXHIBITS:
        plan = read_plan(name, "quick")
        found = read_exhibit(plan, quick)
        assert not has_failure(found["results"]), name
        assert str(quick) not in json.dumps(found["results"]), name  # nor any other folder of this machine
        assert plan.title in page
        assert found["command"] in page
        (tmp_path / f"{name}.json").write_text((quick / f"{name}.json").read_text())
    assert page.count("data:image/png") > 100
    assert main(["reproduce", "all", "--out", str(tmp_path)]) == 0  # from the data alone
    assert (tmp_path / "report.html").read_text().replace(str(tmp_path), str(quick)) == page
    assert not (tmp_path / "work").exists()
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


@pytest.mark.parametrize("name", EXHIBITS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_plan_describes_runs_that_can_be_configured(name, scale):
    plan = read_plan(name, scale)
    assert plan.settings.about
    assert plan.file.differences
    if name in ("table1", "table2", "fig3"):
        assert list_configs(plan)
    for group in plan.settings.runs if name in ("table3", "table4", "fig4") else [plan.settings.run]:
        configure(group)


def numbers_by_table(page):
    """The numbers in the cells of each table of a page."""
    cells = [re.findall(r"<td\b[^>]*>(.*?)</td>", table, re.S) for table in page.split("<table")[1:]]
    texts = [re.sub(r"<[^>]*>", " ", " ".join(own)) for own in cells]
    return [" ".join(re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)) for text in texts]


def test_committed_results_load_and_give_the_committed_page_and_the_numbers_of_the_first_one(tmp_path):
    """The first page was built when all but tables 3 and 4 was computed, before names and formats changed."""
    for name in EXHIBITS:
        found = read_exhibit(read_plan(name, "cpu"), COMMITTED)
        assert found, f"{name}.json was made with other settings than {name}.toml has now"
        assert not has_failure(found["results"])
        (tmp_path / f"{name}.json").write_text((COMMITTED / f"{name}.json").read_text())
    reproduce(["all"], "cpu", tmp_path)
    built = (tmp_path / "report.html").read_text().replace(str(tmp_path), "results/cpu")
    assert built == (COMMITTED / "report.html").read_text()
    now = numbers_by_table(built)
    before = Path(__file__).with_name("cpu_numbers.txt").read_text().splitlines()
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


def test_groups_share_common_values_and_values_may_depend_on_others():
    settings = {
        "about": "made up",
        "common": {"clients": [1, 5], "batch_size": {"of": "clients", "1": 40, "5": 8}, "seeds": 2, "lr": 1e-2},
        "runs": [{"defence": ["plain", "veil"], "lr": 2e-2}, {"defence": "plain", "rounding": 1, "seeds": 1}],
    }
    found = list_configs(dataclasses.replace(read_plan("table2", "quick"), settings=ScaleSettings(**settings)))
    assert len(found) == 2 * 2 * 2 + 2
    assert {(run.data.clients, run.training.batch_size) for run in found} == {(1, 40), (5, 8)}
    lrs = {(run.training.lr, run.defence.settings, defence_name(run)) for run in found}
    assert lrs == {(2e-2, (), "plain"), (2e-2, (), "veil"), (1e-2, ("rounding=1",), "baseline")}


def test_a_failed_cell_is_shown_as_failed(tmp_path):
    plan = read_plan("table1", "quick")
    group = {**plan.settings.runs[0], "layers": 3, "clients": [1, 400], "defence": ["plain", "veil"], "seeds": 1}
    plan = dataclasses.replace(plan, settings=plan.settings.model_copy(update={"runs": [group]}))
    results = run_graph(training.training_graph(plan, tmp_path), tmp_path, workers=1)
    assert [bool(result.failed) for result in results] == [False, False, True, True]
    assert training.format_runs(results[2:], ".3f").startswith("failed: ")
    moved = [dataclasses.replace(result, clients=10 if result.failed else 1) for result in results]
    found = {tuple(row[:2]): row[3] for row in training.present_table1(plan, moved).rows}
    assert re.match(r"\d", found["veil", "1"])
    assert found["veil", "10"].startswith("failed: ")


def test_results_of_another_scale_are_not_overwritten(tmp_path):
    kept = (COMMITTED / "fig4.json").read_bytes()
    (tmp_path / "fig4.json").write_bytes(kept)
    with pytest.raises(BadArgument, match="--scale cpu"):
        reproduce(["table1"], "quick", tmp_path)
    assert (tmp_path / "fig4.json").read_bytes() == kept
    assert not (tmp_path / "work").exists()


def test_missing_data_and_unknown_names_and_scales_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "none"))
    with pytest.raises(BadArgument, match="bank"):
        reproduce(["table1"], "cpu", tmp_path / "out", workers=1)
    assert not list((tmp_path / "out").glob("**/*.json"))
    assert select_names(["fig5", "table1"]) == ["table1", "fig5"]
    with pytest.raises(BadArgument, match="table9"):
        select_names(["table9"])
    with pytest.raises(BadArgument, match="huge"):
        read_plan("table1", "huge")


def attack_plan(name, **changed):
    plan = read_plan(name, "quick")
    settings = plan.settings.model_copy(update={"defences": ["plain", "veil"]} | changed)
    return dataclasses.replace(plan, settings=settings)


def membership(seed, successes):
    """Planted: each attacker's success, on all layers. Its choice is a point more; accuracy is 0.8 + seed / 10."""
    found = {}
    for name, value in successes.items():
        scored = AttackScores(Estimate(value, value - 0.25, value + 0.25), Estimate(0.5, 0.5, 0.5), {}, value + 0.01)
        found[name] = AttackerResults(dict.fromkeys(("last", "second", "third", "three"), scored))
    quality = ("accuracy", 1.0, 0.8 + seed / 10, 0.2 - seed / 10)
    return Membership(*quality, "veil", seed, {}, found)


def planted(seeds=(0.5, 0.6, 0.7), **others):
    plain = {seed: membership(seed, {PUBLISHED: value + 0.2}) for seed, value in enumerate(seeds)}
    veil = {
        seed: membership(seed, {PUBLISHED: value} | {name: values[seed] for name, values in others.items()})
        for seed, value in enumerate(seeds)
    }
    return {"digits": {"plain": plain, "veil": veil}}


def rows_of(shown, measure, defence):
    rows = [dict(zip(shown.header, row, strict=True)) for row in shown.rows]
    return {row["attacker"]: row for row in rows if row["measure"] == measure and row["defence"] == defence}


def test_cells_chart_and_summary_are_means_over_seeds():
    """By hand: 0.5, 0.6, 0.7 have mean 0.6 and deviation 0.1; Student's 0.975 quantile at 2 degrees is 4.302653."""
    results = planted(first=[0.7, 0.8, 0.9], second=[0.8, 0.9, 1.0])
    shown = present_table3(attack_plan("table3", seeds=3), results)
    half = 10 * 4.302653 / 3**0.5
    rows = rows_of(shown, "ASR, last layer", "veil")
    assert list(rows) == [PUBLISHED, "first", "second"]
    assert rows[PUBLISHED]["ours"] == f"60.0 [{60 - half:.1f}, {60 + half:.1f}]"
    assert rows[PUBLISHED]["ours, the paper's choice"] == f"61.0 [{61 - half:.1f}, {61 + half:.1f}]"
    assert rows["second"]["ours"] == f"90.0 [{90 - half:.1f}, 100.0]"
    assert [row["paper"] == "50.24" for row in rows.values()] == [True, False, False]
    [accuracy] = rows_of(shown, "accuracy", "veil").values()
    assert accuracy["ours"] == f"90.0 [{90 - half:.1f}, 100.0]"
    marks = {(mark.group, mark.name): mark for mark in shown.sections[0].rows}
    found = marks["digits, veil", f"ours, {PUBLISHED}"]
    assert (found.value, found.low, found.high) == pytest.approx((60, 60 - half, 60 + half))
    [(_, theirs, ours)] = shown.summary_rows
    assert theirs == "plain 77.56, veil 49.93"
    assert ours == "plain 80.0, veil 60.0, by an adaptive attacker (second) 90.0"
    single = rows_of(present_table3(attack_plan("table3"), planted([0.6])), "ASR, last three", "veil")[PUBLISHED]
    assert single["ours"] == "60.0 [35.0, 85.0]"  # interval over records
    assert single["ours, the paper's choice"] == "61.0"


def test_missing_seeds_of_an_attacker_are_counted_and_failed_ones_named():
    plan, results = attack_plan("table3", seeds=3), planted(some=[0.7, 0.8, 0.9])
    del results["digits"]["veil"][1].attackers["some"]
    results["digits"]["plain"][2] = Failure("no memory")
    shown = present_table3(plan, results)
    assert rows_of(shown, "ASR, last layer", "veil")["some"]["ours"].endswith("(2 of 3 seeds)")
    assert [row["ours"] for row in rows_of(shown, "ASR, last layer", "plain").values()] == ["failed: seed 2: no memory"]
    assert not shown.summary_rows
    plain = json.loads(json.dumps(MEMBERSHIP_KIND.dump_python(results, mode="json")))
    assert has_failure(plain)
    assert MEMBERSHIP_KIND.validate_python(plain) == results


def test_jobs_of_seeds_have_different_names_and_figures_3_and_4_share_those_of_tables_2_and_4(tmp_path):
    plan, first = attack_plan("table4", seeds=3), attack_plan("table4", seeds=1)
    names = [job.name for job in EXHIBITS["table4"].graph(plan, tmp_path).jobs]
    assert [job.name for job in EXHIBITS["table4"].graph(first, tmp_path).jobs] == names[:6]  # more seeds resume
    assert len(names) == len(set(names)) == 3 * 6  # generator, evaluator, two trained and two attacked federations
    assert {job.name for job in EXHIBITS["fig4"].graph(plan, tmp_path).jobs} == set(names[:6])
    table, figure = (set(map(run_name, list_configs(read_plan(name, "quick")))) for name in ("table2", "fig3"))
    assert figure <= table
