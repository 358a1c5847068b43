"""A client's own policy: which server it answers, and what it refuses regardless of the request.

It is a TOML file next to the client's identity, written by the site (`fedveil keys policy`); no message changes it. It
prevents accidents and crude attacks. A server that changes the model slightly between two sums can evade it
(docs/secure-aggregation.md).
"""

from dataclasses import dataclass, fields
from pathlib import Path

from fedveil.checks import check_choice, check_count, is_number
from fedveil.errors import BadArgument
from fedveil.files import write_whole
from fedveil.secagg.identity import HEX, KEY, parse_toml, read_trusted_file

TEXT = """# What this client requires of a server, and how often it answers. No server can change it.

# public key of the server that this client answers (`fedveil keys show` on the server prints it)
server = "{server}"

# minimum number of this client's records in an update
min_records = {min_records}

# minimum number of members in the roster of a sum, and how many of the others may collude with the server
min_members = {min_members}
colluders = {colluders}

# maximum number of sums that this client helps to open
max_sums_per_run = {max_sums_per_run}
max_sums_per_day = {max_sums_per_day}

# when a run's key is replaced: after this many rounds, or hours by this machine's clock
key_rounds = {key_rounds}
key_hours = {key_hours:g}
"""


@dataclass(frozen=True)
class Policy:
    """A client's policy.

    Attributes:
        server: public key of the only server that it answers; with None, it answers none under secure aggregation.
        min_records: minimum number of records in an update: in the shard or the batch that the server asks for.
        min_members: minimum number of members in the roster of a sum.
        colluders: number of other members that may collude with the server; rosters too small for this are refused.
        max_sums_per_run: maximum number of sums that it helps to open in one run.
        max_sums_per_day: maximum number of sums that it helps to open in a day, over all runs (UTC, by its own clock).
        key_rounds: number of rounds after which a run's key is replaced.
        key_hours: number of hours after which a run's key is replaced, by its own clock.
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
            check_count("Policy", name, getattr(self, name))
        check_count("Policy", "min_members", self.min_members, 3)
        check_count("Policy", "colluders", self.colluders, 0)
        if not is_number(self.key_hours) or not 0 < self.key_hours <= 24 * 365:
            raise BadArgument("Policy", f"key_hours must be above 0 and at most a year, got {self.key_hours!r}")

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """Read a policy from a file that only its owner can change."""
        if not path.exists():
            what = "there is no policy, which names the server that this client answers"
            raise BadArgument(str(path), what, "run fedveil keys policy KEY_FILE --server HEX")
        found = parse_toml(path, read_trusted_file(path))
        for name in found:
            check_choice(str(path), "setting", name, [each.name for each in fields(cls)])
        server = found.get("server", "")
        if type(server) is not str or not HEX.fullmatch(server):
            what = "server must be the server's public key, 64 hexadecimal digits"
            raise BadArgument(str(path), what, "run fedveil keys policy KEY_FILE --server HEX")
        try:
            return cls(**{**found, "server": bytes.fromhex(server)})
        except BadArgument as error:
            raise BadArgument(str(path), error.what, error.fix) from None

    def write(self, path: Path) -> Path:
        """Write a file for `read`; refuse to replace an existing file."""
        if self.server is None:
            raise BadArgument("Policy", "it names no server", "pass a public key: Policy(server=...)")
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"server": self.server.hex()}
        return write_whole(path, TEXT.format(**values), 0o644, new=True)
