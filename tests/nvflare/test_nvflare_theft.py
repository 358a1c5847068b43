"""A hostile site in FLARE's own processes: it reads no record of another site, by FLARE's proxies or past them."""

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.results import MLP, records
from tests.deployed.serving import DEFAULTS
from tests.deployed.task import make_model, parts
from tests.nvflare.processes import Flare
from tests.nvflare.theft import holds, stolen

pytestmark = pytest.mark.slow
REFUSAL = "'refused: only the server of this job may call this site'"


def rob(flare, home, attack):
    """Let the second of two sites attack the first in round 0; returns what it got, by names of files."""
    out, loot = home / "out", home / "loot"
    loot.mkdir()
    out.mkdir()
    config = DEFAULTS | {"out": str(out), "wait-for": 2, "loot": str(loot), "attack": attack}
    process = flare.submit("tests.nvflare.app.job", config)
    flare.wait(out)
    assert process.wait(120) == 0, flare.logs()
    assert [(record["answers"], "faults" in record) for record in records(out)] == [(2, False)] * 2
    return {file.stem: gain(file.read_bytes()) for file in loot.glob("*.reply")}


def gain(found):
    """What a reply is worth to the thief."""
    if found.startswith(b"'"):
        return found.decode()
    return "a record" if holds(parts()[0], stolen(found, make_model(MLP))) else "an update"


def test_a_site_asks_another_in_the_simulator(tmp_path):
    with Flare(tmp_path / "flare", sites=2, simulator=True) as flare:
        found = rob(flare, tmp_path, "ask")
    assert found == {"answer": REFUSAL, "ready": REFUSAL}


@pytest.mark.parametrize(
    ("attack", "gains"),
    [("ask", {"answer": REFUSAL, "ready": REFUSAL}), ("pose", {"answer": "'it did not connect'"})],
)
def test_a_site_asks_another_over_mtls_in_its_own_name_and_in_the_servers(attack, gains, tmp_path):
    with Flare(tmp_path / "flare", sites=2) as flare:
        found = rob(flare, tmp_path, attack)
        log = (tmp_path / "flare" / "site-1.log").read_text()
    assert found == gains
    assert ("refused a call by site-2: it is not the server of this job" in log) == (attack == "ask")
