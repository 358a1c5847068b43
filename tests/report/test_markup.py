"""Tables, matrices and pictures as markup."""

import base64

import pytest
from tests.report import demo
from tests.report.tree import read

from fedveil.report import Matrix, Page, Picture, Pictures, Table, render

GREY = Picture(2, 2, 1, bytes([0, 90, 180, 255]))


def drawn(section):
    return read(render(Page("t", "v", [section], "c"))).all("section")[0]


def test_columns_of_numbers_are_aligned_and_failures_marked():
    results = drawn(next(section for section in demo.sections() if section.title == "Results"))
    numeric = ["number" in node.attributes.get("class", "") for node in results.all("thead")[0].all("th")]
    assert numeric == [False, True, True, True, True, True, False]
    assert [node.text for node in results.all("td", "failed")] == ["failed: out of memory"]


def test_an_interval_in_brackets_is_printed_smaller_and_the_cell_reads_the_same():
    rows = [["plain", "89.1% [87.7%, 90.4%]"], ["veil", "0.30 (0.55)"], ["dp", "12 (of 40) clients"]]
    tree = drawn(Table("t", ["defence", "success"], rows))
    assert [node.text for node in tree.all("td")] == [row[1] for row in rows]
    assert [node.text for node in tree.all("small")] == ["[87.7%, 90.4%]", "(0.55)"]


def test_a_matrix_marks_its_diagonal_and_describes_itself():
    tree = drawn(Matrix("m", ["cat", "dog"], [[9, 1], [0, 0]]))
    assert [node.text for node in tree.all("td", "hit")] == ["9", "0"]
    said = "90.00% right: 9 of 10 answers. Most common mistake: cat answered as dog, 1 time."
    assert tree.all("p", "summary")[0].text == said


def test_a_grid_has_one_picture_per_cell_with_alternative_text_and_caption():
    rows = [("original", [GREY, GREY]), ("veil", [None, Picture(2, 2, 1, GREY.data, "7.2 dB")])]
    tree = drawn(Pictures("p", ["image 1", "image 2"], rows, note="PSNR."))
    images = tree.all("img")
    assert [image.attributes["alt"] for image in images] == ["original, image 1", "original, image 2", "veil, image 2"]
    assert [row.text for row in tree.all("tbody")[0].all("tr")] == ["original", "veil7.2 dB"]
    prefix, _, data = images[0].attributes["src"].partition(",")
    assert prefix == "data:image/png;base64"
    assert base64.b64decode(data) == GREY.to_png()


@pytest.mark.parametrize(
    ("width", "height", "shown"),
    [
        (8, 8, "--wide:96px;--narrow:64px"),
        (28, 28, "--wide:84px;--narrow:56px"),
        (32, 64, "--wide:64px;--narrow:32px"),
        (224, 224, "--wide:224px;--narrow:224px"),
    ],
)
def test_a_picture_is_enlarged_by_an_integer_factor(width, height, shown):
    tree = drawn(Pictures("p", ["a"], [("r", [Picture(width, height, 1, bytes(width * height))])]))
    assert tree.all("img")[0].parent.attributes["style"] == shown
