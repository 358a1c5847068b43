"""Figure 4: images that the generator's search finds under each defence, below real images."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import Section
from fedveil.studies.attack import Results
from fedveil.studies.inversion.page import gallery_rows, picture_rows
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.jobs import Failed
from fedveil.studies.paper.attack_tables import attack_graph
from fedveil.studies.paper.plan import Plan, make_exhibit
from fedveil.studies.study import JobGraph, Shown

NOTE = (
    "The first images of each class, from the first seed; none is selected. The paper does not say how its images were "
    "selected."
)


@dataclass(frozen=True)
class ImageGrid:
    """Encoded images of one data set: rows with a label each, under the names of their classes."""

    classes: list[str]
    shape: tuple[int, int, int]
    rows: list[tuple[str, list[str]]]


Grids = dict[str, ImageGrid | Failed]  # by data set


def _grid(results: Results[Inversion]) -> ImageGrid | Failed:
    first = next((one for one in results.values() if isinstance(one, Inversion)), None)
    if first is None or first.gallery is None:
        return Failed("no attack was made")
    return ImageGrid(first.classes, first.gallery.shape, gallery_rows(results))


def graph(plan: Plan, folder: Path) -> JobGraph[Grids]:
    """Return the jobs of Table 4's attacks with the first seed."""
    attacks = attack_graph(INVERSION, plan, folder, seeds=(0,))
    return JobGraph(
        attacks.jobs,
        lambda done: {
            data: _grid({defence: seeds[0] for defence, seeds in found.items()})
            for data, found in attacks.collect(done).items()
        },
    )


def present(plan: Plan, results: Grids) -> Shown:
    """Show a grid of pictures for each data set."""
    sections: list[Section] = [
        picture_rows(f"Figure 4: {data}", found.classes, found.shape, found.rows)
        for data, found in results.items()
        if isinstance(found, ImageGrid)
    ]
    rows = [[data, f"failed: {found.failed}"] for data, found in results.items() if isinstance(found, Failed)]
    return Shown(plan.title, "", ("data", "result"), rows, NOTE, sections)


FIG4 = make_exhibit(TypeAdapter(Grids), graph, present)
