"""Figure 4: what the generator's search finds under each defence, below real images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import Section
from fedveil.studies.attack import Results
from fedveil.studies.inversion.page import gallery_rows, picture_rows
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.inversion.run import INVERSION, Options
from fedveil.studies.jobs import Done, Failed
from fedveil.studies.paper.attacked import AttackExhibit
from fedveil.studies.paper.plan import Plan
from fedveil.studies.study import Shown

NOTE = (
    "The first images of each class, of the first seed, none chosen. The paper shows its images without saying how "
    "they were chosen."
)


@dataclass(frozen=True)
class Grid:
    """Encoded images of one data set: rows with a label each, under the names of their classes."""

    classes: list[str]
    shape: tuple[int, int, int]
    rows: list[tuple[str, list[str]]]


Found = dict[str, Grid | Failed]


def grid_of(results: Results[Inversion]) -> Grid | Failed:
    """Rows of pictures: real, the generator alone, each attacker on each defence."""
    first = next((one for one in results.values() if isinstance(one, Inversion)), None)
    if first is None or first.gallery is None:
        return Failed("no attack was made")
    return Grid(first.classes, first.gallery.shape, gallery_rows(results))


class Fig4(AttackExhibit[Options, Inversion, Found]):
    """The pictures of Table 4's attacks."""

    study = INVERSION
    kind = TypeAdapter(Found)

    def seeds(self, plan: Plan) -> Sequence[int]:
        """The first alone."""
        return (0,)

    def collect(self, plan: Plan, folder: Path, done: Done) -> Found:
        """By data set."""
        return {
            data: grid_of({defence: seeds[0] for defence, seeds in found.items()})
            for data, found in self.attacked(plan, folder, done).items()
        }

    def present(self, plan: Plan, results: Found) -> Shown:
        """A grid of pictures for each data set."""
        sections: list[Section] = [
            picture_rows(f"Figure 4: {data}", found.classes, found.shape, found.rows)
            for data, found in results.items()
            if isinstance(found, Grid)
        ]
        rows = [[data, f"failed: {found.failed}"] for data, found in results.items() if isinstance(found, Failed)]
        return Shown(plan.title, "", ("data", "result"), rows, NOTE, sections)
