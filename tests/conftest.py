"""Settings that all tests share."""

import importlib.util
import os
import signal
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests import seeding

# tests of packages that the development environment lacks (CONTRIBUTING.md, Tests)
collect_ignore = [] if all(map(importlib.util.find_spec, ("transformers", "peft", "datasets"))) else ["optional"]
torch.set_num_threads(1)  # two pytest workers share two cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts commands in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
seeding.replace_system_entropy()

settings.register_profile(
    "quick", max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile("long", max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector):
    """Seed what a file of tests draws when it is imported."""
    seeding.seed_all(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed what a test draws, and what the fixtures of this test alone draw."""
    seeding.seed_all(item.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Give a fixture that tests share numbers that do not depend on which test asks for it first."""
    if fixturedef.scope == "function":
        return (yield)
    state = seeding.get_state()
    seeding.seed_all(f"{fixturedef.baseid}::{fixturedef.argname}[{request.param_index}]")
    try:
        return (yield)
    finally:
        seeding.set_state(state)


@pytest.fixture(autouse=True)
def pages_are_written(request, caplog):
    """Fail a test in which the page of a run could not be written: training only logs this and continues."""
    yield
    if request.node.get_closest_marker("full_disk"):
        return
    logged = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    assert not [text for text in logged if "the report page could not be written" in text]


def pytest_terminal_summary(terminalreporter):
    """Print how long the tests of each folder took; two workers share the minutes on the clock."""
    seconds, tests = Counter(), Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            path = Path(report.nodeid.partition("::")[0])
            folder = path.parts[1] if len(path.parts) > 2 else "."
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    if seconds.total() < 60:
        return
    terminalreporter.section("duration by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{folder:<12} {tests[folder]:>6} tests {spent / 60:>8.1f} minutes")
    terminalreporter.write_line(f"{'in all':<12} {tests.total():>6} tests {seconds.total() / 60:>8.1f} minutes")
