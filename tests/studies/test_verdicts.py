"""The verdict at the top of every kind of page: one plain sentence that follows the figures."""

import re
from pathlib import Path

import pytest
from tests.configs import config_of

from fedveil.attacks.gradients import Search
from fedveil.attacks.observed import PUBLISHED
from fedveil.defences.registry import BUILT_IN
from fedveil.runs import page as run_page
from fedveil.runs.folder import train
from fedveil.studies import demo
from fedveil.studies.attack import Asked
from fedveil.studies.audit import page as audit_page
from fedveil.studies.audit.harden import Row
from fedveil.studies.audit.harden import one_line as hardened
from fedveil.studies.audit.results import Audited, Figures, Guessing, Members, Tried
from fedveil.studies.compare import COMPARE, Compared
from fedveil.studies.estimates import Estimate
from fedveil.studies.gradients import page as gradients_page
from fedveil.studies.gradients import server_page
from fedveil.studies.gradients.results import Batch, Curious, Gradients, Nearest, ServerRound, ServerView, View
from fedveil.studies.gradients.results import Figures as Near
from fedveil.studies.inversion.page import verdict as inverted
from fedveil.studies.inversion.results import Counts, Inversion, Inverted, Judged
from fedveil.studies.jobs import Failed
from fedveil.studies.membership.page import verdict as membership
from fedveil.studies.membership.results import Attacker, Membership, Scored, Sizes
from fedveil.studies.membership.run import MEMBERSHIP, Options
from fedveil.studies.paper.run import EXHIBITS, Made, read, read_plan
from fedveil.studies.paper.run import verdict as reproduced
from fedveil.studies.poisoning.page import BOUNDED, HONEST, UNLIMITED
from fedveil.studies.poisoning.page import verdict as poisoned
from fedveil.studies.poisoning.results import Ending, Endings, Poisoning
from fedveil.studies.victim import Trained

DEFENCES = [record.name for record in BUILT_IN]
NO_TPR = {"0.01": None, "0.001": None}
COMMITTED = Path(__file__).parents[2] / "results" / "cpu"


def checked(said):
    """A verdict as it must be: one sentence of about 160 characters at most."""
    assert re.fullmatch(r"[A-Z].*[^.]\.", said), said
    assert not re.search(r"[.!?] [A-Z]", said), said
    assert len(said) <= 165, (len(said), said)
    return said


def point(value):
    return Estimate(value, value, value)


def around(value):
    return Estimate(value, value - 0.02, value + 0.02)


# A run.


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


def test_the_demo_names_the_attack_that_gets_most():
    views = {"s": 0.97, "r": 0.1, "offset removed (no data needed)": 0.95, "two broadcasts (no data needed)": 0.97}
    said = checked(demo.verdict(0.96, views))
    assert "ends at 97.0 %, plain at 96.0 %" in said
    assert said.endswith("10.0 % as received, 97.0 % after an attack without data (two broadcasts).")
    assert "12.0 % after" in demo.verdict(0.96, {**dict.fromkeys(views, 0.12), "s": 0.97})


# Attacks on several defences.


def trained(*ends, metric="accuracy"):
    records = [[{"round": 1, "seconds": 1.0, "evaluated": True, metric: end}] for end in ends]
    return [Trained("", own, 0.1) for own in records]


def compared(**results):
    return checked(COMPARE.present(Compared(config_of(), tuple(results), 2), results).verdict)


def test_a_comparison_names_the_nearest_and_the_farthest_from_plain():
    plain = trained(0.95, 0.97)
    assert compared(
        plain=plain, baseline=plain, veil=trained(0.96, 0.96), ppdl=trained(0.9, 0.9), spn=trained(0.5, 0.5)
    ) == ("Veil ends within 0.1 points of plain training (accuracy 96.0 %), spn 46.0 points below it.")
    assert (
        compared(plain=plain, veil=trained(0.98, 0.98))
        == "Veil ends 2.0 points above plain training (accuracy 96.0 %)."
    )
    assert compared(veil=trained(0.9, 0.9), spn=[Failed("x"), Failed("x")]) == (
        "Test accuracy ends at 90.0 % (veil); spn failed; plain training was not measured."
    )
    assert compared(plain=[Failed("x")]) == "Every run failed."
    loss = compared(plain=trained(0.05, 0.05, metric="mse"), veil=trained(0.06, 0.06, metric="mse"))
    assert loss == "Veil ends 0.01 above plain training (mse 0.05)."


def members(**aucs):
    """Attackers that reach these AUCs."""
    found = {
        name.replace("_", " "): Attacker(
            "V-out", {"three": Scored(point(0.5), around(auc), NO_TPR), "x": Failed("why")}
        )
        for name, auc in aucs.items()
    }
    return Membership("accuracy", 1.0, 0.8, 0.2, "veil", 0, Sizes(1, 1, 1, 1), found)


def test_membership_tells_what_an_adaptive_attacker_adds():
    plain, veil = members(as_published=0.7), members(as_published=0.51, own_labels=0.69)
    assert PUBLISHED == "as published"
    assert checked(membership({"plain": plain, "veil": veil, "spn": Failed("why")})) == (
        "The strongest attacker tells members from others with an AUC of 0.70 (no defence), 0.69 (veil; as published "
        "0.51); guessing has 0.50."
    )
    assert "0.60 (veil), 0.60 (ppdl)" in checked(membership(dict.fromkeys(DEFENCES, members(as_published=0.6))))
    weak = checked(membership({"plain": members(as_published=0.51), "veil": members(as_published=0.5)}))
    assert weak.startswith("Not even without a defence")
    assert "no undefended federation was attacked" in checked(membership({"own.package:Mine": veil}))
    assert checked(membership({"plain": Failed("x")})) == "Nothing is known: the attack failed under every defence."


def test_the_page_of_an_attack_has_verdict_and_question():
    results = {"plain": members(as_published=0.7), "veil": members(as_published=0.6)}
    shown = MEMBERSHIP.present(Asked(config_of(data="digits"), ("plain", "veil"), Options()), results)
    assert shown.title == "Attack: membership on digits, mlp"
    assert shown.verdict == membership(results)
    assert shown.lead.endswith("digits, mlp, 5 clients.")
    one = MEMBERSHIP.present(Asked(config_of(data="digits"), ("veil",), Options()), {"veil": results["veil"]})
    assert one.title == "Attack: membership on digits, mlp, veil"


def judged(value):
    return Judged(value, value - 0.05, value + 0.05, 1, 1, 0.0, 0.0)


def inversion(floor=0.1, **successes):
    found = {name.replace("_", " "): Inverted("V", judged(v), judged(v), judged(v)) for name, v in successes.items()}
    return Inversion("", 0, 1.0, 1.0, 1.0, ["a"], Counts(1, 1, 1, 1), found, judged(floor), judged(1.0), 0.0)


def test_inversion_is_beside_what_needs_no_model():
    assert checked(inverted({"plain": inversion(as_published=0.7), "veil": inversion(as_published=0.12, own=0.6)})) == (
        "Of the rebuilt images, an independent network takes 70 % (no defence), 60 % (veil; as published 12 %) for the "
        "private class; without a model 10 %."
    )
    assert checked(inverted({"plain": inversion(as_published=0.12)})).startswith(
        "Not even without a defence do rebuilt"
    )


def gradients(**psnr):
    near = {view: View([db - 0.2, db + 0.2] * 4, [0.5], [0.1], 1, 0.0, 0, 0.0, ["AA=="]) for view, db in psnr.items()}
    floors = {"mean image": Near([11.0], [0.1], [0.1])}
    return Gradients(0, {"batch1-0": Batch(1, [0], Search(), near, floors, ["AA=="], (1, 1, 1))})


def test_gradients_have_the_best_view_beside_a_guess():
    veil = gradients(**{"V-up": 12.0, "V-diff, two broadcasts": 22.0})
    assert checked(gradients_page.verdict({"plain": gradients(**{"V-up": 25.0}), "veil": veil}, 1)) == (
        "Images rebuilt from gradients have a PSNR of 25.0 dB (no defence), 22.0 dB (veil; as published 12.0 dB); a "
        "guess has 11.0 dB."
    )
    weak = checked(gradients_page.verdict({"plain": gradients(**{"V-up": 11.1})}, 1))
    assert (
        weak == "Not even without a defence are images rebuilt from gradients (11.1 dB) better than a guess (11.0 dB)."
    )


def curious(**best):
    def view(db):
        return ServerView(1, {"search": Nearest(db, 0.5, 0, "AA==")}, {"mean image": Nearest(10.0, 0.1, 0, "AA==")})

    views = {name.replace("_", " "): view(db) for name, db in best.items()}
    return Curious([ServerRound([0], Search(), views, ["AA=="], (1, 1, 1), 0.0)])


def test_a_curious_server_has_what_any_defence_gives_it():
    views = {
        "single_update": 90.0,
        "sum_of_2": 30.0,
        "sum_of_4": 12.0,
        "sum_of_100": 9.0,
        "10_minus_9, same model": 9.0,
    }
    plain, veil = curious(**views), curious(**{**views, "10_minus_9, same model": 40.0})
    assert checked(server_page.one_line({"plain": plain})) == (
        "A curious server rebuilds a record from single updates and sums over 2 clients, but from no sum over 4 or 100 "
        "clients."
    )
    assert "2 clients and the difference of two sums, but" in checked(
        server_page.one_line({"plain": plain, "veil": veil})
    )
    assert checked(server_page.one_line({"plain": curious(single_update=12.0)})).startswith(
        "A curious server rebuilds no"
    )
    assert checked(server_page.one_line({"plain": Failed("x")})) == "A curious server was not measured."


def poisoning(honest, **attacks):
    def ending(value):
        return Ending(value, "" if value is not None else "it ended", 9, 0, 0)

    limits = (UNLIMITED, BOUNDED, "median", "krum")
    runs = {HONEST: [honest] * 4, **attacks}
    return Poisoning({name: [Endings(dict(zip(limits, map(ending, own), strict=False)))] for name, own in runs.items()})


def test_hostile_clients_are_judged_by_their_worst_attack():
    limits = [UNLIMITED, BOUNDED, "median", "krum"]
    plain = poisoning(0.95, flip=[0.1, 0.9, 0.94, 0.7], noise=[0.5, 0.3, 0.91, 0.8])
    assert checked(poisoned({"plain": plain, "veil": Failed("x")}, limits)) == (
        "With honest clients accuracy is 95.0 %; the worst attack leaves 10.0 % with no limits, 30.0 % with bounds, "
        "91.0 % with the best rule (median)."
    )
    ended = poisoning(0.95, overflow=[None, 0.95, 0.95, 0.95])
    assert "leaves no model with no limits, 30.0 % with" in checked(poisoned({"plain": plain, "veil": ended}, limits))
    assert checked(poisoned({"plain": Failed("x")}, limits)).startswith("Nothing is known")


def audited(agreement, auc, psnr, floor=10.0):
    view = Figures(point(agreement), membership=Members({"loss": Tried(0.5, point(auc), point(auc), {})}))
    rebuilt = {"adaptive": point(psnr), "floor": point(floor)}
    return Audited("accuracy", 1.0, 1.0, 0.0, "a", 10, 1, 20, {"adaptive": view}, rebuilt, Guessing(0.1))


def test_an_audit_of_one_defence_has_the_strongest_attackers_figures():
    plain = audited(1.0, 0.7, 40.0)
    assert checked(audit_page.one_line({"plain": plain, "veil": audited(1.0, 0.6, 10.0)})) == (
        "Against the strongest attacker, veil does not protect the model (100 % agreement), partly protects who took "
        "part (AUC 0.60) and protects a single record (10 dB)."
    )
    assert checked(audit_page.one_line({"veil": audited(1.0, 0.7, 40.0), audit_page.UNDEFENDED: plain})) == (
        "Against the strongest attacker, veil does not protect the model (100 % agreement), who took part (AUC 0.70) "
        "or a single record (40 dB)."
    )
    flat = audited(1.0, 0.5, 40.0)
    assert "shows nothing about who took part and" in checked(
        audit_page.one_line({"plain": flat, "veil": audited(0.3, 0.5, 10.0)})
    )
    assert checked(audit_page.one_line({"plain": plain})).startswith(
        "Against the strongest attacker, plain training does"
    )
    assert "There is no verdict" in checked(audit_page.one_line({"plain": Failed("x"), "veil": plain}))


def test_an_audit_of_several_says_which_protect_what():
    plain = audited(1.0, 0.7, 40.0)
    several = {"plain": plain, "veil": plain, "ppdl": audited(0.1, 0.7, 10.0), "spn": audited(0.1, 0.7, 40.0)}
    assert checked(audit_page.one_line(several)) == (
        "Against the strongest attacker, the model is protected by ppdl and spn; who took part is protected by none of "
        "3 defences; a single record is protected by ppdl."
    )


def row(name, membership, cost):
    return Row(name, point(0.9), point(cost), {}, "own labels", membership, None, None, None)


def test_hardening_names_what_comes_nearest():
    bare = row("no veil at all", point(0.9), 0.0)
    asked = "the best membership attacker to 52 % for 0.5 points of accuracy"
    rows = [bare, row("weight decay 0.003", point(0.6), 0.001), row("dear", point(0.5), 0.1)]
    assert checked(hardened(rows)) == (
        f"No setting holds {asked}; weight decay 0.003 comes nearest (60.0 %, 90.0 % without a defence)."
    )
    assert checked(hardened([*rows, row("good", point(0.51), 0.004)])).startswith(
        f"At least one setting holds {asked}: good"
    )
    assert checked(hardened([bare, row("dear", point(0.5), 0.1)])) == f"No setting holds {asked}: none costs so little."
    assert checked(hardened([bare])).startswith("There is no verdict")


def test_the_page_of_the_paper_joins_cost_and_attacks():
    def made(*names):
        found = {}
        for name in names:
            plan = read_plan(name, "cpu")
            file = read(plan, COMMITTED)
            found[name] = Made(plan, file, EXHIBITS[name].loaded(plan, file["results"]))
        return checked(reproduced(found))

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
    assert made("fig4") == "There is no verdict: what is here has no figures that could be judged."
