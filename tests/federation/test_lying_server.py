"""A server that lies in every message gets nothing that it may not have, and each safeguard is needed for that."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.federation.lying import LyingServer

from fedveil.errors import FedveilError
from fedveil.federation import client as client_module
from fedveil.federation.protocol import Step, read
from fedveil.secagg import party, rules
from fedveil.secagg.memory import RunMemory
from fedveil.wire import read_kind

QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def lies(examples, steps, **options):
    """Let the server lie; returns how many messages it sent, and how often each kind was answered."""
    sent, answered = [], Counter()

    class Counted(LyingServer):
        def send(self, message, *rest, **named):
            said = super().send(message, *rest, **named)
            if not isinstance(said, FedveilError):
                answered[read(said, Step).step if read_kind(said) == "step" else "masked"] += 1
            return said

        def teardown(self):
            sent.append(self.steps)
            super().teardown()

    chosen = settings(max_examples=examples, stateful_step_count=steps, **QUIET, **options)
    run_state_machine_as_test(Counted, settings=chosen)
    return sum(sent), answered


def test_a_lying_server_gets_nothing_that_it_may_not_have(capfd):
    _, answered = lies(30, 20)
    assert {"hello", "masked", "settle", "reveal"} <= set(answered)  # honest messages are among the lies


@pytest.mark.slow
def test_twenty_thousand_lies(capfd):
    sent, answered = lies(800, 40)
    print(sent, answered)
    assert sent >= 20_000
    assert set(answered) == {"hello", "masked", "settle", "reveal", "end"}


def nothing(*arguments):
    return None


RULES = ("attempt", "round", "roster", "membership", "roster_size", "step", "members", "survivors")
SAFEGUARDS = {
    **{f"check_{name}": (rules, nothing) for name in (*RULES, "agreement", "budget", "same_members")},
    "admit_message": (party, lambda server, channels, digest, own: own[65 if own[:1] == b"s" else 33 :]),
    "forget_attempt": (RunMemory, nothing),
    "contribute": (client_module, lambda admitted, work: work()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_without_a_safeguard_the_lies_are_noticed(name, monkeypatch, capfd):
    module, instead = SAFEGUARDS[name]
    monkeypatch.setattr(module, name, instead)
    with pytest.raises(BaseException):  # noqa: B017, PT011  (several failures come as a group, and an exit is one)
        lies(200, 30, phases=[Phase.generate], report_multiple_bugs=False)
