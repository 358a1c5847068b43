"""Series: thinning keeps what a reader would see."""

import math
import random

from fedveil.report.series import thin


def test_thinning_keeps_ends_and_extremes():
    draw = random.Random(3)
    points = [(float(k), draw.random()) for k in range(20_000)]
    points[777], points[15_123] = (777.0, 40.0), (15_123.0, -40.0)
    kept = thin(points, 500)
    assert len(kept) <= 502
    assert {points[0], points[-1], points[777], points[15_123]} <= set(kept)
    assert list(kept) == sorted(kept)
    for start in range(0, 20_000, 80):
        run = [y for _, y in points[start : start + 80]]
        assert {min(run), max(run)} <= {y for x, y in kept if start <= x < start + 80}


def test_thinning_keeps_gaps():
    points = [(float(k), math.nan if k == 5_000 else 1.0) for k in range(20_000)]
    assert any(math.isnan(y) for _, y in thin(points, 500))
