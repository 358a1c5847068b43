"""Every fault of a deployment on every engine: who answered in each round, and the model of plain training."""

import json
import shutil
import tomllib

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")
pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.engines import ENGINES
from tests.deployed.outcomes import GOES_ON, OUTCOMES, RESUMES
from tests.deployed.results import answered, error, kinds, records
from tests.deployed.serving import DEFAULTS
from tests.flower.processes import APP

needs_keys = pytest.mark.skipif(
    not shutil.which("openssl") or not shutil.which("ssh-keygen"), reason="no openssl, ssh-keygen"
)
EVERYONE = (0, 1, 2)


def kill_work(deployed, out, rounds):
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, work=3.0, wait=False)
    deployed.await_work(1, 1)
    deployed.kill_work(1)


def kill_site(deployed, out, rounds):
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, work=3.0, wait=False)
    deployed.await_work(1, 1)
    deployed.kill_client(1)


def restart_site(deployed, out, rounds):
    config = {"min_answers": 3, "attempts": 20, "patience": deployed.patience}  # the round waits for it
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, work=3.0, wait=False, **config)
    deployed.await_work(1, 1)
    deployed.kill_client(1)
    deployed.start_client(1)


def straggle(deployed, out, rounds):
    late = deployed.timeout + 10.0
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, faults="1:1:late", late=late, work=1.0, wait=False)


def garble(deployed, out, rounds):
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, faults="1:1:garbage", wait=False)


def distrust(deployed, out, rounds):
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, wait_for=2, wait=False)


def kill_server(deployed, out, rounds):
    deployed.run(out, rounds=rounds, timeout=deployed.timeout, work=1.0, wait=False)
    deployed.await_work(0, 2)
    deployed.kill_server()
    deployed.restart_server()


FAULTS = {
    "the process that computes is killed": kill_work,
    "a site is killed": kill_site,
    "a killed site is started again": restart_site,
    "a straggler": straggle,
    "garbage": garble,
    "a wrong certificate": distrust,
    "the server is killed and started again": kill_server,
}
CASES = [(engine, fault) for fault, engines in OUTCOMES.items() for engine in engines]


def assert_answered(found, wanted):
    """`wanted` is that of `Outcome`: clients of each round, or * for all of them or all but 1."""
    assert len(found) == len(wanted.split())
    for who, text in zip(found, wanted.split(), strict=True):
        assert who in ([EVERYONE, (0, 2)] if text == "*" else [tuple(map(int, text))]), found


@needs_keys
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "fault"), CASES, ids=[f"{engine}-{fault}" for engine, fault in CASES])
def test_a_fault_has_the_outcome_of_the_table(engine, fault, tmp_path):
    outcome, out = OUTCOMES[fault][engine], tmp_path / "out"
    rounds = len(outcome.answered.split())
    with ENGINES[engine](tmp_path / "deployed") as deployed:
        stranger = None
        for part in EVERYONE:
            if fault == "a wrong certificate" and part == 1:
                stranger = deployed.client_with_wrong_certificate(part)
            else:
                deployed.start_client(part)
        FAULTS[fault](deployed, out, rounds)
        if outcome.then == RESUMES:
            deployed.run(out, rounds=rounds, timeout=deployed.timeout)
        deployed.wait(out)
        if stranger and deployed.strangers_end:
            assert stranger.wait(60) != 0, deployed.logs()
    assert_answered(answered(out), outcome.answered)
    assert error(out) < 1e-6
    done = json.loads((out / "done.json").read_text())
    assert (done["from"] == 0) == (outcome.then == GOES_ON)
    assert done["to"] == rounds
    if fault == "garbage":
        assert kinds(out) == [[], ["malformed"], []]
    if (fault, outcome.then) == ("a killed site is started again", GOES_ON):
        assert records(out)[1]["attempts"] > 1


def test_the_table_has_every_fault_and_every_engine():
    assert OUTCOMES.keys() == FAULTS.keys()
    assert all(engines.keys() == ENGINES.keys() for engines in OUTCOMES.values())


def test_the_app_of_flower_has_the_defaults_of_all_engines():
    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == DEFAULTS
