"""Compare the times of several variants on a busy machine.

A repetition times every variant once, in rotated order, and ratios are taken within a repetition, so that a
slow second slows all variants. Repetitions during which other processes used the cores are dropped.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

STAT = Path("/proc/stat")
IDLE = slice(3, 5)  # idle and iowait, among the counters of STAT
COUNTERS = slice(1, 9)  # user nice system idle iowait irq softirq steal
MOST_FOREIGN = 0.08  # share of the cores that other processes may use during a repetition

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Timings:
    """Seconds per call by variant, one number per repetition that was kept.

    Attributes:
        seconds: by variant.
        repetitions: how many there were.
        quiet: how many of them other processes left alone; more are kept if these are too few.
    """

    seconds: dict[str, list[float]]
    repetitions: int
    quiet: int

    @property
    def kept(self) -> str:
        """How many repetitions count, for a table's foot."""
        kept = len(next(iter(self.seconds.values())))
        busy = f", only {self.quiet} of them quiet" if self.quiet < kept else ""
        return f"kept {kept} of {self.repetitions}{busy}"


@dataclass(frozen=True)
class Summary:
    """Median seconds per call, and quartiles of the ratios to the baseline of the same repetition."""

    seconds: float
    ratio: Quartiles


def machine() -> str:
    """The machine in a line."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs"


def busy_seconds() -> float | None:
    """CPU time that all processes, and the host, have used since boot; None if not available."""
    try:
        counters = [int(field) for field in STAT.read_text().split("\n", 1)[0].split()[COUNTERS]]
    except (OSError, ValueError):
        return None
    return (sum(counters) - sum(counters[IDLE])) / os.sysconf("SC_CLK_TCK")


def foreign_share(busy_before: float | None, own: float, elapsed: float) -> float:
    """The share of all cores that others used in `elapsed` seconds, of which `own` CPU seconds were ours."""
    busy = busy_seconds()
    if busy is None or busy_before is None:
        return 0.0
    return max(0.0, busy - busy_before - own) / (elapsed * (os.cpu_count() or 1))


def seconds_a_call(work: Callable[[], object], calls: int) -> float:
    """The mean over a few calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def interleave(
    variants: dict[str, Callable[[], object]],
    repetitions: int,
    calls: int,
    *,
    warm_up: int = 2,
    least: int = 5,
) -> Timings:
    """Time every variant once per repetition.

    Args:
        variants: name -> work.
        repetitions: how many rounds over all variants.
        calls: how many calls in a row are one timing; a repetition should last 0.2 s or more, because the
            kernel counts CPU time in steps of 0.01 s.
        warm_up: untimed calls of each variant before the first repetition.
        least: minimum number of repetitions to keep, the quietest first, however busy the machine is.
    """
    for work in variants.values():
        seconds_a_call(work, warm_up)
    names = list(variants)
    found: list[tuple[float, dict[str, float]]] = []
    for number in range(repetitions):
        first = number % len(names)
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        timed = {name: seconds_a_call(variants[name], calls) for name in names[first:] + names[:first]}
        share = foreign_share(busy, time.process_time() - own, time.perf_counter() - start)
        found.append((share, timed))
    found.sort(key=lambda pair: pair[0])
    quiet = sum(share < MOST_FOREIGN for share, _ in found)
    kept = [timed for _, timed in found[: max(quiet, least)]]
    return Timings({name: [timed[name] for timed in kept] for name in names}, repetitions, quiet)


def quartiles(values: Sequence[float]) -> Quartiles:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compare(timings: Timings, baseline: str) -> dict[str, Summary]:
    """Every variant against a baseline."""
    base = timings.seconds[baseline]
    return {
        name: Summary(statistics.median(times), quartiles([t / b for t, b in zip(times, base, strict=True)]))
        for name, times in timings.seconds.items()
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side: the first aligned left, the others right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def verdict(value: float, bound: float | None) -> tuple[str, str]:
    """The bound and whether the value keeps it, as a table shows them; NaN does not."""
    if bound is None:
        return "-", "info"
    return f"{bound:g}", "ok" if value <= bound else "OVER"
