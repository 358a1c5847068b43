"""`fedveil flare-kit`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from fedveil.errors import BadArgument

PACKAGE = "whose installed classes a job may use without bringing code, such as bank_flare; once for each"


def flare_kit(
    kit: Annotated[Path, Positional, arg(metavar="KIT", help="folder of the startup kit of a server or a site")],
    package: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME", help=PACKAGE)] = (),
) -> None:
    """Keep logs on the site, and list packages whose classes may run."""
    try:
        from fedveil.nvflare import configure
    except ImportError as error:
        what, fix = "NVIDIA FLARE is not installed", "pip install 'fedveil[nvflare]'"
        raise BadArgument("fedveil flare-kit", what, fix) from error
    if not (kit / "startup").is_dir():
        raise BadArgument(
            str(kit), "is not a startup kit: it has no folder startup", "run nvflare provision -p project.yml"
        )
    print(configure(kit, *package))
