"""Which factors an axis lets through."""

from enum import IntFlag


class Symmetry(IntFlag):
    """The factors that an operation commutes with; ``a & b`` is what both let through.

    NOTHING allows only 1, SIGN {+1, -1}, POSITIVE every positive number, EVERYTHING every number except 0.
    """

    NOTHING = 0
    SIGN = 1
    POSITIVE = 2
    EVERYTHING = 3

    @property
    def words(self) -> str:
        """The symmetry as shown to users."""
        return {0: "pinned", 1: "signs", 2: "positive", 3: "any"}[int(self)]
