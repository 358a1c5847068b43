"""Records that a node keeps in a file."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.forms import FORMS, records

from fedveil.errors import BadArgument
from fedveil.flower import cache_records


@pytest.mark.parametrize("form", [*FORMS, "tensor"])
def test_cached_records_come_back_in_their_form(form, tmp_path):
    change = FORMS[form][1] if form in FORMS else (lambda x: x)
    numbers, targets = records((4,), classes=True)[0]
    file, made = tmp_path / "node" / "records", []

    def make():
        made.append(1)
        return change(numbers), targets

    for _ in range(2):
        inputs, labels = cache_records(file, make)
        assert repr(inputs) == repr(change(numbers))
        assert torch.equal(labels, targets)
    assert len(made) == 1
    assert file.stat().st_mode & 0o777 == 0o600
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert torch.equal(cache_records(file, make)[1], targets)
    assert len(made) == 2  # a damaged file is written again


def test_inputs_that_a_file_cannot_hold_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="a value of type object"):
        cache_records(tmp_path / "records", lambda: ({"a": object()}, torch.zeros(2)))
