"""Pictures: the PNG holds the given pixels, and the grid has labels."""

import base64
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.tree import read

from fedveil.report import Picture, Pictures
from fedveil.report.pictures import encode, pictures

GREY = Picture(2, 2, 1, bytes([0, 90, 180, 255]))


@st.composite
def rasters(draw):
    width, height, channels = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.sampled_from([1, 3]))
    size = width * height * channels
    return width, height, channels, draw(st.binary(min_size=size, max_size=size))


@given(raster=rasters())
def test_a_png_holds_the_pixels_given(raster):
    image = pytest.importorskip("PIL.Image")
    width, height, channels, data = raster
    with image.open(io.BytesIO(encode(Picture(*raster)))) as opened:
        opened.load()  # checks every checksum
        assert (opened.format, opened.size, opened.mode) == ("PNG", (width, height), {1: "L", 3: "RGB"}[channels])
        assert opened.tobytes() == data


def test_a_grid_has_one_picture_per_cell_with_alternative_text_and_caption():
    rows = [("original", [GREY, GREY]), ("veil", [None, Picture(2, 2, 1, GREY.data, "7.2 dB")])]
    tree = read(pictures(Pictures("p", ["image 1", "image 2"], rows, note="PSNR.")))
    images = tree.all("img")
    assert [image.attributes["alt"] for image in images] == ["original, image 1", "original, image 2", "veil, image 2"]
    assert [row.text for row in tree.all("tbody")[0].all("tr")] == ["original", "veil7.2 dB"]
    assert [node.text for node in tree.all("thead")[0].all("th")] == ["image 1", "image 2"]
    prefix, _, data = images[0].attributes["src"].partition(",")
    assert prefix == "data:image/png;base64"
    assert base64.b64decode(data) == encode(GREY)
    assert tree.all("div", "scroll")[0].attributes["aria-label"] == "p"
    assert tree.all("p", "note")[0].text == "PSNR."


@pytest.mark.parametrize(
    ("width", "height", "shown"),
    [
        (8, 8, "--wide:96px;--narrow:64px"),
        (28, 28, "--wide:84px;--narrow:56px"),
        (32, 64, "--wide:64px;--narrow:32px"),
        (224, 224, "--wide:224px;--narrow:224px"),
    ],
)
def test_a_picture_is_enlarged_by_a_whole_factor(width, height, shown):
    picture = Picture(width, height, 1, bytes(width * height))
    tree = read(pictures(Pictures("p", ["a"], [("r", [picture])])))
    assert tree.all("img")[0].parent.attributes["style"] == shown
