"""Lines on a logarithmic axis as a standalone SVG file, for the docs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedveil.report.scale import linear, logarithmic
from fedveil.report.style import LIGHT

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 70, 20, 210, 50


def draw(path: Path, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Write the picture: one line per series, named at its end."""
    points = [point for line in series.values() for point in line]
    across = linear(min(x for x, _ in points), max(x for x, _ in points), wanted=8, outward=False)
    up = logarithmic(min(y for _, y in points), max(y for _, y in points), wanted=8)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * across.place(x), TOP + high * (1 - up.place(y))

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{LIGHT["surface"]}"/>']
    for value, label in up.ticks:
        y = TOP + high * (1 - up.place(value))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + wide}" stroke="{LIGHT["grid"]}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in across.ticks:
        x = LEFT + wide * across.place(value)
        parts.append(f'<text x="{x:.1f}" y="{TOP + high + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<path d="M{LEFT} {TOP + high}H{LEFT + wide}" stroke="{LIGHT["ink"]}"/>')
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_label}</text>')
    middle = TOP + high / 2
    parts.append(f'<text transform="rotate(-90 16 {middle})" x="16" y="{middle}" text-anchor="middle">{y_label}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = LIGHT[f"s{number}"]
        places = [place(x, y) for x, y in line]
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{steps}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = TOP + 16 + 20 * number
        parts.append(f'<circle cx="{LEFT + wide + 16}" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + wide + 28}" y="{y}">{name}</text>')
    style = f'font-family="sans-serif" font-size="12" fill="{LIGHT["ink"]}"'
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>\n{body}\n</svg>\n'
    )
