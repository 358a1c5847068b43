"""`fedveil keys` and `fedveil flare-kit`: the files that members of a federation need on their machines."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from fedveil.errors import BadArgument

ACTIONS = (
    "new: create a signing key and print its roster line; show: print the roster line of a key; policy: write a "
    "client's policy; ledger: print how much of its privacy budget a client has spent"
)
NAME = "for new, the name of the member; otherwise its key file"
SERVER = "for policy: public key of the server to answer (the 64 hexadecimal digits in its roster line)"
PACKAGE = "installed package, such as bank_flare, whose classes a job may use without shipping their code"


def keys(
    action: Annotated[Literal["new", "show", "policy", "ledger"], arg(help=ACTIONS)],
    name: Annotated[str, Positional, arg(metavar="NAME|FILE", help=NAME)],
    out: Annotated[Path, arg(help="folder to write NAME.key to")] = Path(),
    server: Annotated[str, arg(help=SERVER, metavar="HEX", help_behavior_hint="")] = "",
) -> None:
    """Create or show a key, write a policy, or show how much of a privacy budget has been spent."""
    from fedveil.secagg.identity import HEX, Identity
    from fedveil.secagg.policy import Policy

    if action == "new":
        identity = Identity.new(name)
        identity.save(out / f"{name}.key")
        print(identity.line())
        return
    identity = Identity.load(Path(name))
    if action == "show":
        print(identity.line())
        return
    if action == "ledger":
        _print_ledger(Path(name).with_suffix(".policy"))
        return
    key = server.split()[-1] if server.strip() else ""
    if not HEX.fullmatch(key):
        raise BadArgument("--server", "the server's public key must be 64 hexadecimal digits", "run fedveil keys show")
    path = Policy(server=bytes.fromhex(key)).write(Path(name).with_suffix(".policy"))
    print(f"{path}: {identity.name} answers only the server {key[:8]}...; edit the file to change its limits")


def _print_ledger(path: Path) -> None:
    from fedveil.privacy.ledger import PrivacyLedger
    from fedveil.secagg.policy import Policy

    limits = Policy.read(path).privacy
    if limits is None:
        raise BadArgument(str(path), "it has no [privacy] table, so there is no ledger", "add the table to the policy")
    ledger = PrivacyLedger(limits.ledger, limits.epsilon, limits.delta, varying=limits.varying)
    budget = f"epsilon {ledger.epsilon():.3g} of {limits.epsilon:g} (delta {limits.delta:g})"
    print(f"{limits.dataset}: {budget}, rounds: {sum(ledger.spent().values())}")


def flare_kit(
    kit: Annotated[Path, Positional, arg(metavar="KIT", help="folder with the startup kit of a server or a site")],
    package: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME", help=PACKAGE)] = (),
) -> None:
    """Configure a startup kit: keep logs on the site, and allow the classes of the given packages."""
    try:
        from fedveil.nvflare import configure
    except ImportError as error:
        fix = "pip install 'fedveil[nvflare]'"
        raise BadArgument("fedveil flare-kit", "NVIDIA FLARE is not installed", fix) from error
    if not (kit / "startup").is_dir():
        message = "is not a startup kit: it has no startup folder"
        raise BadArgument(str(kit), message, "run nvflare provision -p project.yml")
    print(configure(kit, *package))
