"""Every fault of a deployment on every engine: who answered in each round, and the model of plain training."""

import json
import tomllib

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")
pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.engines import ENGINES
from tests.deployed.results import answered, error, kinds, records
from tests.deployed.serving import DEFAULTS
from tests.flower.processes import APP, needs_keys

EVERYONE = (0, 1, 2)
GOES_ON = "goes on"
RESUMES = "ends, and resumes by submitting again"
BY_ITSELF = "ends, and fedveil.nvflare.submit submits it again by itself"


def submit(deployed, out, rounds, **config):
    deployed.run(out, rounds=rounds, wait=False, **config)


def kill_work(deployed, *run):
    submit(deployed, *run, work=3.0, timeout=deployed.timeout)
    deployed.await_work(1, 1)
    deployed.kill_work(1)


def kill_site(deployed, *run, **config):
    submit(deployed, *run, work=3.0, timeout=deployed.timeout, **config)
    deployed.await_work(1, 1)
    deployed.kill_client(1)


def restart_site(deployed, *run):
    kill_site(deployed, *run, min_answers=3, attempts=20, patience=deployed.patience)  # the round waits for it
    deployed.start_client(1)


def straggle(deployed, *run):
    submit(deployed, *run, work=1.0, faults="1:1:late", timeout=deployed.timeout)


def garble(deployed, *run):
    submit(deployed, *run, faults="1:1:garbage")


def distrust(deployed, *run):
    submit(deployed, *run, wait_for=2)


def kill_server(deployed, *run):
    submit(deployed, *run, work=1.0)
    deployed.await_work(0, 2)
    deployed.kill_server()
    deployed.restart_server()


CASES = [
    ("the process that computes is killed", kill_work, "flower", GOES_ON, "012 02 * 012"),
    ("the process that computes is killed", kill_work, "nvflare", BY_ITSELF, "012 * 012"),
    ("a site is killed", kill_site, "flower", GOES_ON, "012 02 02"),
    ("a site is killed", kill_site, "nvflare", GOES_ON, "012 02 02"),
    ("a killed site is started again", restart_site, "flower", GOES_ON, "012 012 012"),
    ("a killed site is started again", restart_site, "nvflare", BY_ITSELF, "012 012 012"),
    ("a straggler", straggle, "flower", GOES_ON, "012 02 012"),
    ("a straggler", straggle, "nvflare", GOES_ON, "012 02 " + "* " * 25 + "012"),
    ("garbage", garble, "flower", GOES_ON, "012 02 012"),
    ("garbage", garble, "nvflare", GOES_ON, "012 02 012"),
    ("a wrong certificate", distrust, "flower", GOES_ON, "02 02"),
    ("a wrong certificate", distrust, "nvflare", GOES_ON, "02 02"),
    ("the server is killed and started again", kill_server, "flower", RESUMES, "012 012 012 012"),
    ("the server is killed and started again", kill_server, "nvflare", BY_ITSELF, "012 012 012 012"),
]
"""The fault of client 1 in round 1 (of 0, 1, 2 ...), or of the server in round 2, and its outcome on an engine.

The last column has the clients that answered in each round: "012 02 *" is all, all but 1, either of these two.
"""


def assert_answered(found, wanted):
    assert len(found) == len(wanted.split())
    for who, text in zip(found, wanted.split(), strict=True):
        assert who in ([EVERYONE, (0, 2)] if text == "*" else [tuple(map(int, text))]), found


@needs_keys
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "harm", "engine", "then", "wanted"), CASES, ids=[f"{c[2]}-{c[0]}" for c in CASES])
def test_a_fault_has_the_outcome_of_the_table(fault, harm, engine, then, wanted, tmp_path):
    out, rounds = tmp_path / "out", len(wanted.split())
    with ENGINES[engine](tmp_path / "deployed") as deployed:
        stranger = None
        for part in EVERYONE:
            if fault == "a wrong certificate" and part == 1:
                stranger = deployed.client_with_wrong_certificate(part)
            else:
                deployed.start_client(part)
        harm(deployed, out, rounds)
        if then == RESUMES:
            deployed.run(out, rounds=rounds)
        deployed.wait(out)
        if stranger and deployed.strangers_end:
            assert stranger.wait(60) != 0, deployed.logs()
    assert_answered(answered(out), wanted)
    assert error(out) < 1e-6
    done = json.loads((out / "done.json").read_text())
    assert (done["from"] == 0) == (then == GOES_ON)
    assert done["to"] == rounds
    if fault == "garbage":
        assert kinds(out) == [[], ["malformed"], []]
    if (fault, then) == ("a killed site is started again", GOES_ON):
        assert records(out)[1]["attempts"] > 1


def test_the_app_of_flower_has_the_defaults_of_all_engines():
    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == DEFAULTS
