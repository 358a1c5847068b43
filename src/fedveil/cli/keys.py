"""`fedveil keys`."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

WHAT = "make a new signing key and print its roster line, or show the line of a key file"
NAME = "of the member, for a new key; for `show`, its key file"


def keys(
    what: Annotated[Literal["new", "show"], arg(help=WHAT)],
    name: Annotated[str, Positional, arg(metavar="NAME|FILE", help=NAME)],
    out: Annotated[Path, arg(help="folder for NAME.key")] = Path(),
) -> None:
    """Keys of members in secure aggregation."""
    from fedveil.secagg.identity import Identity

    if what == "show":
        print(Identity.load(Path(name)).line())
        return
    identity = Identity.new(name)
    identity.save(out / f"{name}.key")
    print(identity.line())
