"""How many modules one round passes through: a reader who follows it opens as many files."""

import sys
from pathlib import Path

import torch

import fedveil
from fedveil.models import mlp

SOURCE = Path(fedveil.__file__).parent
MAX_FILES = 17  # lower it when modules are merged; it must not grow


def trace_files(call):
    """The files of the package whose code runs in a call."""
    seen = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in path.parents:
            seen.add(str(path.relative_to(SOURCE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_a_veiled_round_in_one_process_passes_through_few_files():
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(3)]
    federation = fedveil.Federation(mlp(6, 3, hidden=8), data, "veil", batch_size=4)
    federation.step()  # what is made once
    found = trace_files(federation.step)
    assert {"federation/server.py", "scheme/recover.py"} <= found
    assert len(found) <= MAX_FILES, sorted(found)
