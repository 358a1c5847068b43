"""`fedveil keys`."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

WHAT = "make a signing key and print its roster line; show the line of a key file; or write a client's policy"
NAME = "name of the member, for a new key; its key file otherwise"
SERVER = "public key of the server that the client answers, for `policy`: the 64 digits of the server's roster line"


def keys(
    what: Annotated[Literal["new", "show", "policy"], arg(help=WHAT)],
    name: Annotated[str, Positional, arg(metavar="NAME|FILE", help=NAME)],
    out: Annotated[Path, arg(help="folder for NAME.key")] = Path(),
    server: Annotated[str, arg(help=SERVER, metavar="HEX")] = "",
) -> None:
    """Make or show a key, or write a policy."""
    from fedveil.errors import BadArgument
    from fedveil.secagg.identity import HEX, Identity
    from fedveil.secagg.policy import Policy

    if what == "show":
        print(Identity.load(Path(name)).line())
    elif what == "new":
        identity = Identity.new(name)
        identity.save(out / f"{name}.key")
        print(identity.line())
    else:
        key = server.split()[-1] if server.strip() else ""
        if not HEX.fullmatch(key):
            raise BadArgument("--server", "the server's public key has 64 hexadecimal digits", "run fedveil keys show")
        own = Identity.load(Path(name))
        path = Policy(server=bytes.fromhex(key)).write(Path(name).with_suffix(".policy"))
        print(f"{path}: {own.name} answers the server {key[:8]}... alone; edit the file to change its limits")
