"""Sections refuse values that contradict one another; a PNG has the given pixels."""

import io
from functools import partial
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import BadArgument
from fedveil.report import Curves, Interval, Intervals, Matrix, Picture, Pictures, Table

LINE = {"a": [(0, 1.0), (1, 2.0)]}
band, interval = partial(Curves, "t", "epoch", "accuracy", LINE), partial(Interval, "adaptive", group="veil")
limits = partial(Intervals, "t", "AUC", [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(band, bands={"a": [(0.0, 1.0)]}), "Curves 't': the band of 'a' must have 2 finite pairs"),
        (partial(band, bands={"a": [(0.0, 1.0), (2.0, 1.0)]}), "low before high"),
        (partial(band, bands={"a": [(0.0, 1.0), (1.0, nan)]}), "2 finite pairs"),
        (partial(interval, nan), "Interval 'adaptive' of group 'veil': invalid interval: value nan"),
        (partial(interval, 0.5, 0.4, inf), "high inf"),
        (partial(interval, 0.5, 0.4, None), "with both ends"),
        (partial(interval, 0.5, 0.6, 0.4), "low before high"),
        (partial(interval, None, 0.4, 0.6), "pass a value with both ends"),
        (partial(limits, {"chance": nan}), "Intervals 't': a reference or a limit is not finite"),
        (partial(limits, {}, low=1.0, high=0.0), "low 1.0 is not below high 0.0"),
        (partial(Picture, 2, 2, 3, b"1234"), "2 x 2 pixels of 3 channels need 12 bytes, got 4"),
        (partial(Picture, 2, 2, 4, bytes(16)), "with 1 or 3 channels"),
        (partial(Picture, 2, 2, 1, [0, 1, 2, 3]), "pass array.tobytes()"),
        (partial(Pictures, "p", ["a", "b"], [("veil", [None])]), "row 'veil' has 1 pictures for 2 columns"),
        (partial(Table, "t", ["a", "b"], [["1", "2"], ["3"]]), "Table 't': row 2 has 1 cells, but the header has 2"),
        (partial(Matrix, "m", ["a", "b"], [[1, 2]]), "Matrix 'm': 2 labels need 2 rows of 2 counts"),
        (partial(Matrix, "m", ["a"], [[-1]]), "Matrix 'm': a count is negative"),
    ],
)
def test_contradictory_values_are_refused(make, message):
    with pytest.raises(BadArgument) as refused:
        make()
    assert message in str(refused.value)


@st.composite
def rasters(draw):
    width, height, channels = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.sampled_from([1, 3]))
    size = width * height * channels
    return width, height, channels, draw(st.binary(min_size=size, max_size=size))


@given(raster=rasters())
def test_a_png_has_the_given_pixels(raster):
    image = pytest.importorskip("PIL.Image")
    width, height, channels, data = raster
    with image.open(io.BytesIO(Picture(*raster).to_png())) as opened:
        opened.load()  # checks every checksum
        assert (opened.format, opened.size, opened.mode) == ("PNG", (width, height), {1: "L", 3: "RGB"}[channels])
        assert opened.tobytes() == data
