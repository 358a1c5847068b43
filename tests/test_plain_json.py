"""All JSON is valid: what is not finite is null, or a text that reads back as a number."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.configs import config_of
from tests.small import SMALL

from fedveil.federation.history import RoundRecord
from fedveil.plain_json import to_json
from fedveil.runs.build import build_federation, load_data

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def strictly(text):
    return json.loads(text, parse_constant=pytest.fail)


@settings(max_examples=30)
@given(values)
def test_what_is_written_is_json_and_differs_only_where_it_must(value):
    def same(found, given):
        if isinstance(given, float) and not math.isfinite(given):
            return found is None
        if isinstance(given, dict):
            return found.keys() == given.keys() and all(same(found[key], given[key]) for key in given)
        if isinstance(given, list):
            return len(found) == len(given) and all(map(same, found, given))
        return found == given

    assert same(strictly(to_json(value)), value)


@given(st.lists(st.floats()))
def test_exact_values_are_read_back(numbers):
    found = TypeAdapter(list[float]).validate_python(strictly(to_json(numbers, exact=True)))
    assert str(found) == str(numbers)


def test_a_runs_files_are_json(tmp_path):
    config = config_of(**SMALL)
    data = load_data(config)
    federation = build_federation(config, data)
    federation.history.records.append(RoundRecord(1, 1.0, math.inf, 0.1, 0.0, metrics={"loss": math.nan}))
    federation.fit(rounds=1, test=(data.test.inputs, data.test.targets), folder=tmp_path)
    lines = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"round": 1, "epoch": 1.0, "loss": None, "error": None, "lr": 0.1, "seconds": 0.0}
    assert strictly((tmp_path / "summary.json").read_text())["largest_error"] is None
