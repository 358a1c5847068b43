"""A client's own policy: which server it answers, and which requests it refuses.

It is a TOML file next to the client's identity, written by the site (`fedveil keys policy`); no message can change it.
It prevents accidents and crude attacks. A server that changes the model slightly between two sums can evade it
(docs/secure-aggregation.md).
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from fedveil.checks import check_choice, check_count, check_range, is_number
from fedveil.errors import BadArgument
from fedveil.files import write_atomically
from fedveil.secagg.identity import HEX, KEY_SIZE, parse_toml, read_trusted_file

TEMPLATE = """# This client's requirements for a server, and how often it answers. No server can change them.

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

# Differential privacy for each record. Remove the # signs to take part only in rounds in which every client adds noise
# with secure aggregation, and only until the budget is spent, over all runs and servers.
# [privacy]
# dataset = "patients-2026"  # a name for the records, which have one ledger, next to this file
# records = 8000             # number of records, which is public
# epsilon = 3.0              # the budget
# delta = 1e-5
# noise = 0.5                # minimum noise multiplier
# rate = 1.0                 # maximum sampling rate
# colluding = 1              # minimum number of clients that may collude
# varying = false            # whether rounds may differ in noise and rate, which costs more epsilon
"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class PrivacyLimits:
    """The privacy that a client requires before its records take part in a round, regardless of the server's request.

    Attributes:
        dataset: name of the records.
        records: the declared number of records, used as the client's weight in a sum. It is public; the records
            are not counted.
        epsilon: the budget for each record over all runs.
        ledger: file that lists the rounds that these records have taken part in.
        delta: the delta at which epsilon is computed.
        noise: minimum noise multiplier.
        rate: maximum sampling rate.
        colluding: minimum number of clients that may collude without weakening the guarantee.
        varying: whether rounds may differ in noise multiplier and sampling rate, which costs more epsilon.
    """

    dataset: str
    records: int
    epsilon: float
    ledger: Path
    delta: float = 1e-5
    noise: float = 0.5
    rate: float = 1.0
    colluding: int = 1
    varying: bool = False

    def __post_init__(self) -> None:
        where = "PrivacyLimits"
        if type(self.varying) is not bool:
            raise BadArgument(where, f"varying must be true or false, got {self.varying!r}")
        if type(self.dataset) is not str or not NAME.fullmatch(self.dataset):
            raise BadArgument(where, "dataset must consist of letters, digits, dots, hyphens and underscores")
        check_count(where, "records", self.records)
        check_count(where, "colluding", self.colluding)
        for name, low, high in (("epsilon", 1e-3, 1e3), ("noise", 0.1, 1e6)):
            check_range(where, name, getattr(self, name), low, high)
        for name, high in (("delta", 0.1), ("rate", 1.0)):
            check_range(where, name, getattr(self, name), 1e-30, high)

    @classmethod
    def from_table(cls, table: object, policy: Path) -> "PrivacyLimits":
        """Read the [privacy] table of a policy; the ledger is a file next to the policy."""
        names = [field.name for field in fields(cls) if field.name != "ledger"]
        if not isinstance(table, dict) or not {"dataset", "records", "epsilon"} <= table.keys():
            raise BadArgument("privacy", "it must be a table with dataset, records and epsilon")
        for name in table:
            check_choice("privacy", "setting", name, names)
        return cls(**table, ledger=policy.parent / f"{table['dataset']}.ledger")


@dataclass(frozen=True)
class Policy:
    """A client's policy.

    Attributes:
        server: public key of the only server that the client answers; if None, the client refuses secure aggregation.
        min_records: minimum number of records in an update: in the shard or the batch that the server asks for.
        min_members: minimum number of members in the roster of a sum.
        colluders: number of other members that may collude with the server; rosters that are too small for this number
            are refused.
        max_sums_per_run: maximum number of sums that the client helps to open in one run.
        max_sums_per_day: maximum number of sums that the client helps to open in a day, over all runs (UTC, by its
            clock).
        key_rounds: number of rounds after which a run's key is replaced.
        key_hours: number of hours, by the client's clock, after which a run's key is replaced.
        privacy: requirements for the privacy of each record, or None.
    """

    server: bytes | None = None
    min_records: int = 32
    min_members: int = 3
    colluders: int = 1
    max_sums_per_run: int = 10_000
    max_sums_per_day: int = 20_000
    key_rounds: int = 50
    key_hours: float = 24.0
    privacy: PrivacyLimits | None = None

    def __post_init__(self) -> None:
        if self.server is not None and (type(self.server) is not bytes or len(self.server) != KEY_SIZE):
            raise BadArgument("Policy", f"server must be a public key of {KEY_SIZE} bytes")
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
            problem = "there is no policy file to specify the server that this client answers"
            raise BadArgument(str(path), problem, "run fedveil keys policy KEY_FILE --server HEX")
        result = parse_toml(path, read_trusted_file(path))
        for name in result:
            check_choice(str(path), "setting", name, [field.name for field in fields(cls)])
        server = result.get("server", "")
        if type(server) is not str or not HEX.fullmatch(server):
            problem = "server must be the server's public key, 64 hexadecimal digits"
            raise BadArgument(str(path), problem, "run fedveil keys policy KEY_FILE --server HEX")
        try:
            privacy = PrivacyLimits.from_table(result["privacy"], path) if "privacy" in result else None
            return cls(**{**result, "server": bytes.fromhex(server), "privacy": privacy})
        except BadArgument as error:
            raise BadArgument(str(path), error.what, error.fix) from None

    def write(self, path: Path) -> Path:
        """Write a file that `read` accepts; refuse to replace an existing file."""
        if self.server is None:
            raise BadArgument("Policy", "it does not specify a server", "pass a public key: Policy(server=...)")
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"server": self.server.hex()}
        return write_atomically(path, TEMPLATE.format(**values), 0o644, new=True)
