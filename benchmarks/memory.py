"""A client's peak memory, compared with a plain step: ResNet20, batch 32, m = 1.

    PYTHONPATH=src python -m benchmarks.memory

Counted are the bytes of live CPU tensors, by the profiler's record of each allocation and release, above
those alive when the call begins. What the call returns (uploads, or a plain step's gradient) is shown
separately: the bound is for the rest.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fedveil
from benchmarks.speed import plain_step, residual
from benchmarks.timing import table, verdict

BOUND = 1.5
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak, with and without what the call returned, and the bytes of that."""

    whole: int
    passing: int
    returned: int


def allocations(work: Callable[[], object]) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation, and (address, -bytes) of each release, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is chatty on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    del kept
    events = sorted((e for e in trace if e["name"] == "[memory]"), key=lambda e: e["args"]["Ev Idx"])
    return [(e["args"]["Addr"], e["args"]["Bytes"]) for e in events if e["args"]["Device Type"] == 0]


def survivors(events: Sequence[tuple[int, int]]) -> set[int]:
    """Positions of the allocations that nothing released: what the call returned."""
    last: dict[int, int] = {}
    for position, (address, size) in enumerate(events):
        if size > 0:
            last[address] = position
        else:
            last.pop(address, None)
    return set(last.values())


def peak(work: Callable[[], object]) -> Peak:
    """What a call allocates at its peak."""
    work()
    events = allocations(work)
    returned = survivors(events)
    whole = passing = most = most_passing = 0
    for position, (_, size) in enumerate(events):
        whole += size
        passing += 0 if position in returned else size
        most, most_passing = max(most, whole), max(most_passing, passing)
    return Peak(most, most_passing, whole)


def check_method() -> None:
    """The method must find a peak that is known: of 12 million bytes, 4 million of them returned."""

    def work() -> torch.Tensor:
        first = torch.ones(2_000_000)
        second = first[:1_000_000] + 1
        return second[: len(first) // 2]

    found, million = peak(work), 1_000_000
    for name, size, known in (
        ("whole", found.whole, 12 * million),
        ("passing", found.passing, 8 * million),
        ("returned", found.returned, 4 * million),
    ):
        assert abs(size / known - 1) < 0.02, f"{name}: measured {size} bytes, known {known}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if the bound is exceeded."""
    torch.manual_seed(0)
    check_method()
    case = residual(quick=True)
    sent = fedveil.Veil().perturb(case.model, fedveil.analyse(case.model, case.inputs)).broadcast
    plain = peak(plain_step(case))
    client = peak(lambda: fedveil.client_step(case.model, sent, case.inputs, case.targets))
    rows = [
        [name, *(f"{size / MEBIBYTE:.2f}" for size in (found.whole, found.returned, found.passing))]
        for name, found in (("plain step", plain), ("client_step, m=1", client))
    ]
    ratio = client.passing / plain.passing
    rows.append(
        [
            "ratio",
            f"x{client.whole / plain.whole:.3f}",
            f"x{client.returned / plain.returned:.3f}",
            f"x{ratio:.3f}",
        ]
    )
    print(case.name)
    print(table(["MiB", "peak", "returned", "peak without what is returned"], rows))
    bound, word = verdict(ratio, BOUND)
    print(f"without uploads x{ratio:.3f}, bound {bound}: {word}")
    return int(word == "OVER")


if __name__ == "__main__":
    sys.exit(main())
