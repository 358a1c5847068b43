"""A client's own policy: which server it answers, and what it refuses whatever that server asks.

It is a TOML file beside the client's identity, written by the site (`fedveil keys policy`), and no message changes it.
It stops accidents and crude attacks. A server that changes the model a little between two sums gets past it
(docs/secure-aggregation.md).
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedveil.checks import number, whole
from fedveil.errors import BadArgument
from fedveil.files import write_whole
from fedveil.secagg.identity import HEX, KEY, read_trusted

TEXT = """# What this client asks of a server, and how often it answers. No server can change it.

# public key of the server that this client answers (`fedveil keys show` on the server prints it)
server = "{server}"

# fewest own records behind an update
min_records = {min_records}

# fewest members in a sum's roster, and how many of the others may collude with the server
min_members = {min_members}
colluders = {colluders}

# most sums that this client helps to open
max_sums_per_run = {max_sums_per_run}
max_sums_per_day = {max_sums_per_day}

# when a run's key is replaced: after this many rounds, or hours by this machine's clock
key_rounds = {key_rounds}
key_hours = {key_hours:g}
"""


@dataclass(frozen=True)
class Policy:
    """A client's terms.

    Attributes:
        server: public key of the only server that it answers; None names none, and then messages are not answered
            under secure aggregation.
        min_records: fewest own records behind an update: of the whole shard, or of the batch that the server asks for.
        min_members: fewest members in the roster of a sum.
        colluders: how many other members may tell the server all they know; smaller rosters are refused.
        max_sums_per_run: sums of a run that it helps to open.
        max_sums_per_day: sums of all runs that it helps to open in a day (UTC, by its own clock).
        key_rounds: rounds after which a run's key is replaced.
        key_hours: hours after which a run's key is replaced, by its own clock.
    """

    server: bytes | None = None
    min_records: int = 32
    min_members: int = 3
    colluders: int = 1
    max_sums_per_run: int = 10_000
    max_sums_per_day: int = 20_000
    key_rounds: int = 50
    key_hours: float = 24.0

    def __post_init__(self) -> None:
        if self.server is not None and (type(self.server) is not bytes or len(self.server) != KEY):
            raise BadArgument("Policy", f"server must be a public key of {KEY} bytes")
        for name in ("min_records", "max_sums_per_run", "max_sums_per_day", "key_rounds"):
            whole("Policy", name, getattr(self, name))
        whole("Policy", "min_members", self.min_members, 3)
        whole("Policy", "colluders", self.colluders, 0)
        if not number(self.key_hours) or not 0 < self.key_hours <= 24 * 365:
            raise BadArgument("Policy", f"key_hours must be above 0 and at most a year, got {self.key_hours!r}")

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """The policy in a file that only its owner can change."""
        if not path.exists():
            what = "there is no policy, which names the server that this client answers"
            raise BadArgument(str(path), what, "fedveil keys policy KEY_FILE --server HEX")
        try:
            found: dict[str, Any] = tomllib.loads(read_trusted(path))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise BadArgument(str(path), f"is not TOML: {type(error).__name__}", "write it again") from None
        strange = sorted(found.keys() - {each.name for each in fields(cls)})
        if strange:
            known = ", ".join(each.name for each in fields(cls))
            raise BadArgument(str(path), f"there is no setting {strange[0][:80]!a}", f"use one of {known}")
        server = found.get("server", "")
        if type(server) is not str or not HEX.fullmatch(server):
            what = "server must be the server's public key, 64 hexadecimal digits"
            raise BadArgument(str(path), what, "fedveil keys policy KEY_FILE --server HEX")
        try:
            return cls(**{**found, "server": bytes.fromhex(server)})
        except BadArgument as error:
            raise BadArgument(str(path), error.what, error.fix) from None

    def write(self, path: Path) -> Path:
        """Write the file that `read` reads; a file that is there already stays."""
        if self.server is None:
            raise BadArgument("Policy", "it names no server", "Policy(server=...)")
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"server": self.server.hex()}
        return write_whole(path, TEXT.format(**values), 0o644, new=True)
