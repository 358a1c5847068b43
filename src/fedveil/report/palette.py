"""Colours by what they are for, light and dark. Series differ for the colour-blind too, and in dash and mark."""

from collections.abc import Mapping

LIGHT = {
    "page": "#fbfbfa",
    "surface": "#ffffff",
    "ink": "#1b1f24",
    "quiet": "#5a626c",
    "line": "#dfe2e6",
    "grid": "#eceef0",
    "accent": "#1f5fae",
    "bad": "#a8321a",
    "hit": "#8fbcec",
    "miss": "#f3ae84",
    "s0": "#1f5fae",
    "s1": "#d1590b",
    "s2": "#0b8a68",
    "s3": "#a03a86",
    "s4": "#8a6d00",
    "s5": "#2a8fc4",
    "s6": "#6b4fbb",
    "s7": "#5f676f",
}
DARK = {
    "page": "#14171b",
    "surface": "#1a1e23",
    "ink": "#e6e8ea",
    "quiet": "#9aa3ad",
    "line": "#30363d",
    "grid": "#262b31",
    "accent": "#7fb2ee",
    "bad": "#f0917a",
    "hit": "#23548c",
    "miss": "#945022",
    "s0": "#7fb2ee",
    "s1": "#f5924e",
    "s2": "#41c69f",
    "s3": "#dd8fca",
    "s4": "#d6b545",
    "s5": "#6fd0f2",
    "s6": "#b19cf0",
    "s7": "#aab2ba",
}
COLOURS = 8
DASHES = ((), (7, 5), (1.5, 5), (12, 4, 2, 4), (3, 3), (14, 6))


def _block(scheme: str, colours: Mapping[str, str]) -> str:
    """A CSS block that sets every colour."""
    variables = "".join(f"--{name}:{colour};" for name, colour in colours.items())
    return f"{{color-scheme:{scheme};{variables}}}"


def theme_css() -> str:
    """The system's theme by default, the reader's choice where one was made, light on paper."""
    light, dark = _block("light", LIGHT), _block("dark", DARK)
    return (
        f":root{light}\n"
        f"@media (prefers-color-scheme: dark){{:root{dark}}}\n"
        f":root[data-theme=light]{light}\n:root[data-theme=dark]{dark}\n"
        f"@media print{{:root,:root[data-theme]{light}}}\n"
    )


def series_class(number: int) -> str:
    """The class that gives series `number` its colour."""
    return f"s{number % COLOURS}"


def series_dash(number: int, stretch: float = 1.0) -> str | None:
    """The dash pattern of series `number`, stretched; None is solid. Series that share a colour differ in dash."""
    pattern = DASHES[(number % COLOURS + number // COLOURS) % len(DASHES)]
    return " ".join(f"{stretch * length:g}" for length in pattern) or None


def series_css() -> str:
    """The rules behind `series_class`."""
    return "".join(f".s{number}{{color:var(--s{number})}}\n" for number in range(COLOURS))
