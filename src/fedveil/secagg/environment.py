"""Load a member's keys, roster and policy from files given by environment variables; a job cannot choose them."""

import os
from pathlib import Path

from fedveil.errors import BadArgument
from fedveil.secagg.identity import Identity, Roster
from fedveil.secagg.memory import Memory
from fedveil.secagg.party import Party
from fedveil.secagg.policy import Policy

IDENTITY, ROSTER, POLICY = "FEDVEIL_IDENTITY", "FEDVEIL_ROSTER", "FEDVEIL_POLICY"


def load_party(identity: Path, roster: Path, policy: Path | None = None) -> Party:
    """Load a client's party from its roster and the files that `fedveil keys` wrote.

    The keys of a run, and the state that must not be lost before the run ends, are stored in a file next to the
    identity, so that a restarted client can continue.

    Args:
        identity: the file written by `fedveil keys new`.
        roster: the file that lists the members that may take part.
        policy: the file written by `fedveil keys policy`; by default, the file next to the identity.
    """
    client_policy = Policy.read(policy or identity.with_suffix(".policy"))
    memory = Memory(identity.with_suffix(".memory"))
    result = Party(Identity.load(identity), Roster.read(roster), memory, policy=client_policy)
    result.sweep()
    return result


def load_own_party() -> Party | None:
    """Load the party that this client's environment defines, or return None."""
    identity, roster, policy = (os.environ.get(name) for name in (IDENTITY, ROSTER, POLICY))
    if not identity:
        return None
    if not roster:
        raise BadArgument(IDENTITY, f"{ROSTER} is not set", f"set {ROSTER} to the file that lists the members")
    return load_party(Path(identity), Path(roster), Path(policy) if policy else None)


def load_own_policy() -> Policy | None:
    """Load the policy of a client without secure aggregation from its environment, or return None."""
    path = os.environ.get(POLICY)
    return Policy.read(Path(path)) if path else None


def load_server_files() -> tuple[Identity | None, Roster | None]:
    """Load the server's signing key and roster; each is None if its environment variable is not set."""
    identity, roster = os.environ.get(IDENTITY), os.environ.get(ROSTER)
    return Identity.load(Path(identity)) if identity else None, Roster.read(Path(roster)) if roster else None
