"""Format numbers, and build the axes of charts with their ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from fedveil.report import NOTHING

MIN_RELATIVE_SPAN = 1e-9  # values with a smaller span, relative to their size, are drawn as a single value

Ticks = tuple[tuple[float, str], ...]  # value, label


def format_number(value: float) -> str:
    """Format a number with at most six significant digits, writing exponents as in 1e-6.

    >>> format_number(0.97222222), format_number(2.5e-7), format_number(20000.0), format_number(math.nan)
    ('0.972222', '2.5e-7', '20000', 'nan')
    """
    text = f"{value:.6g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


def align(cells: Sequence[str]) -> list[str]:
    """Pad the numbers in a column with zeros to the same number of decimals, except those in exponent notation.

    >>> align(["0.51", "0.6319", NOTHING, "2e-7"])
    ['0.5100', '0.6319', '\u2013', '2e-7']
    """
    is_decimal = [cell != NOTHING and "e" not in cell for cell in cells]
    decimals = max((len(cell.partition(".")[2]) for cell in compress(cells, is_decimal)), default=0)
    return [
        f"{float(cell):.{decimals}f}" if decimals and is_padded else cell
        for cell, is_padded in zip(cells, is_decimal, strict=True)
    ]


def tick_label(value: float, step: float) -> str:
    """Format a tick with the number of decimals that the step between ticks requires.

    >>> tick_label(0.5, 0.25), tick_label(97.5, 2.5), tick_label(15000, 5000), tick_label(3e-7, 1e-7)
    ('0.50', '97.5', '15,000', '3e-7')
    """
    if step < 1e-4 or abs(value) >= 1e7:
        return format_number(round(value / step) * step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) != round(step * 10**decimals):
        decimals += 1
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


@dataclass(frozen=True)
class ChartAxis:
    """An axis from `low` to `high` with its ticks."""

    low: float
    high: float
    log: bool
    ticks: Ticks

    def position(self, value: float) -> float:
        """Return the position of a value, from 0 at the low end to 1 at the high end."""
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def nice_step(span: float, max_intervals: int) -> float:
    """Return a step (1, 2, 2.5 or 5 times a power of ten) that divides a span into at most `max_intervals` parts."""
    power = 10.0 ** math.floor(math.log10(span / max_intervals))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if span / (factor * power) <= max_intervals * 1.001)


def _linear_ticks(low: float, high: float, step: float) -> Ticks:
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return tuple((number * step, tick_label(number * step, step)) for number in range(first, last + 1))


def linear_axis(low: float, high: float, *, max_intervals: int, extend: bool, min_step: float = 0.0) -> ChartAxis:
    """Return a linear axis with ticks at least `min_step` apart; `extend` moves its ends outwards to ticks."""
    size = max(abs(low), abs(high))
    if high - low <= MIN_RELATIVE_SPAN * size or high - low <= 1e-290:  # a single value: leave a margin
        margin = 0.1 * size if size > 1e-290 else 1.0
        low, high = low - margin, high + margin
    step = max(nice_step(high - low, max_intervals), min_step)
    if extend:
        low, high = math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step
    return ChartAxis(low, high, False, _linear_ticks(low, high, step))


def _log_ticks(low: float, high: float, max_intervals: int) -> Ticks:
    """Return powers of ten; if at most one fits, also 2 and 5 times a power of ten, or the ticks of a linear axis."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, math.ceil((last - first) / max_intervals))
    decades = [power for power in range(first, last + 1) if power % step == 0]
    if len(decades) >= 2:
        return tuple((10.0**power, f"1e{power}" if power else "1") for power in decades)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    values = [value for power in powers for value in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    values = [value for value in values if low <= value <= high]
    if len(values) < 2:
        values = [value for value, _ in _linear_ticks(low, high, nice_step(high - low, max_intervals))]
    return tuple((value, format_number(value)) for value in values)


def log_axis(low: float, high: float, *, max_intervals: int, extend: bool = True) -> ChartAxis:
    """Return a logarithmic axis; `low` must be above zero. `extend` adds a margin at both ends."""
    first, last = math.log10(low), math.log10(high)
    margin = max(0.05 * (last - first), 0.02) if extend or last - first < 0.04 else 0.0
    if high <= low * (1 + MIN_RELATIVE_SPAN):
        margin = 0.3
    low, high = 10 ** max(-305.0, first - margin), 10 ** min(305.0, last + margin)
    return ChartAxis(low, high, True, _log_ticks(low, high, max_intervals))
