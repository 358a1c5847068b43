"""Numbers as a reader wants them."""

import math
from collections.abc import Sequence

NOTHING = "\u2013"  # a dash where there is no number


def short(value: float) -> str:
    """Six significant digits at most, powers of ten as 1e-6.

    >>> short(0.97222222), short(2.5e-7), short(20000.0), short(math.nan)
    ('0.972222', '2.5e-7', '20000', 'nan')
    """
    text = f"{value:.6g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


def aligned(cells: Sequence[str]) -> list[str]:
    """The cells of a column with zeros added so that their points stand below one another; powers of ten stay.

    >>> aligned(["0.51", "0.6319", NOTHING, "2e-7"])
    ['0.5100', '0.6319', '\u2013', '2e-7']
    """
    decimals = max((len(cell.partition(".")[2]) for cell in cells if _plain(cell)), default=0)
    return [f"{float(cell):.{decimals}f}" if decimals and _plain(cell) else cell for cell in cells]


def _plain(cell: str) -> bool:
    """Whether a cell is a number without a power of ten."""
    return cell != NOTHING and "e" not in cell


def stepped(value: float, step: float) -> str:
    """A tick's label: as many decimals as the step between ticks needs, thousands apart.

    >>> stepped(0.5, 0.25), stepped(15000, 5000), stepped(3e-7, 1e-7)
    ('0.50', '15,000', '3e-7')
    """
    if step < 1e-4 or abs(value) >= 1e7:
        return short(round(value / step) * step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals and round(step * 10**decimals, 6) != round(step * 10**decimals):
        decimals += 1
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "value"), count(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
