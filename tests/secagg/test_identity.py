"""Identities and rosters: files that come back, and those that are refused."""

import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedveil.errors import BadArgument
from fedveil.secagg import Identity, Memory, Party, Policy, Roster, environment

KEY = "ab" * 32


def test_an_identity_comes_back_and_signs_alike(tmp_path):
    identity = Identity.new("alice")
    found = Identity.load(identity.save(tmp_path / "a.key"))
    assert (found.name, found.public()) == ("alice", identity.public())
    roster = Roster({"alice": identity.public()})
    assert roster.verifies("alice", found.sign(b"x"), b"x")
    assert not roster.verifies("alice", found.sign(b"x"), b"y")
    assert not roster.verifies("bob", found.sign(b"x"), b"x")
    (tmp_path / "a.key").write_text("private = 1")
    with pytest.raises(BadArgument, match="is not an identity file"):
        Identity.load(tmp_path / "a.key")


def test_the_environment_names_a_nodes_files_and_no_job_does(tmp_path, monkeypatch):
    identity = Identity.new("node-0")
    monkeypatch.setenv(environment.IDENTITY, str(identity.save(tmp_path / "node-0.key")))
    with pytest.raises(BadArgument, match="FEDVEIL_ROSTER"):
        environment.load_own_party()
    roster = Roster({"node-0": identity.public()})
    monkeypatch.setenv(environment.ROSTER, str(roster.write(tmp_path / "roster")))
    with pytest.raises(BadArgument, match=r"node-0.policy: there is no policy"):
        environment.load_own_party()
    Policy(server=b"k" * 32).write(tmp_path / "node-0.policy")
    party = environment.load_own_party()
    assert (party.name, party.policy.server) == ("node-0", b"k" * 32)
    party.hello("run")
    assert (tmp_path / "node-0.memory").stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv(environment.IDENTITY)
    assert environment.load_own_party() is None


def test_a_roster_comes_back(tmp_path):
    roster = Roster({name: Identity.new(name).public() for name in ("zoe", "alice")})
    found = Roster.read(roster.write(tmp_path / "roster"))
    assert repr(found) == "Roster(zoe, alice)"
    assert all(found.public_key(name) == roster.public_key(name) for name in roster.names)
    with pytest.raises(BadArgument, match="it does not contain 'bob'"):
        roster.public_key("bob")


def test_what_holds_secrets_is_neither_pickled_nor_copied_nor_shown():
    identity = Identity.new("alice")
    party = Party(identity, Roster({"alice": identity.public()}))
    for holder, shown in ((identity, "Identity('alice')"), (party, "Party('alice')"), (Memory(), "Memory()")):
        assert repr(holder) == str(holder) == shown
        for leave in (pickle.dumps, copy.copy):
            with pytest.raises(BadArgument, match="secrets cannot be pickled or copied"):
                leave(holder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe", "is not a text file"),
        ("alice", "line 1: a line must contain a name and a public key"),
        (f"\nalice {KEY[:-1]}", "line 2: a line must contain a name and a public key"),
        (f"alice {KEY} more", "a line must contain a name and a public key"),
        (f"al/ice {KEY}", "line 1: a member's name must have"),
        (f"alice {KEY}\nalice {'cd' * 32}", "line 2: alice is listed twice"),
        (f"alice {KEY}\nbob {KEY}", "two members have the same public key"),
    ],
)
def test_rosters_that_make_no_sense_are_refused(tmp_path, text, message):
    (tmp_path / "roster").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadArgument, match=message):
        Roster.read(tmp_path / "roster")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadArgument, match="cannot be read"):
            Roster.read(path)


def test_two_that_save_a_key_at_once_do_not_overwrite_one_another(tmp_path):
    """One of them gets the name, the other an error; a check before the write would let both through."""
    path, start = tmp_path / "a.key", threading.Barrier(8)

    def save(identity):
        start.wait()
        try:
            return Identity.load(identity.save(path)).public() == identity.public()
        except BadArgument as error:
            return "already exists and will not be overwritten" in str(error)

    identities = [Identity.new("alice") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(save, identities))
    assert Identity.load(path).public() in [identity.public() for identity in identities]
    assert [found.name for found in tmp_path.iterdir()] == ["a.key"]


@pytest.fixture
def files(tmp_path):
    """A member's files, by how they are read."""
    identity = Identity.new("alice")
    return {
        Identity.load: identity.save(tmp_path / "a.key"),
        Roster.read: Roster({"alice": identity.public()}).write(tmp_path / "roster"),
        Policy.read: Policy(server=identity.public()).write(tmp_path / "alice.policy"),
    }


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646, 0o640])
def test_files_that_others_can_change_and_keys_that_others_can_read_are_refused(files, mode):
    texts = {Identity.load: "others can read or change this private file"}
    for read, path in files.items():
        read(path)
        path.chmod(mode)
        if mode & 0o022 or read == Identity.load:
            with pytest.raises(BadArgument, match=f"{texts.get(read, 'others can change this file')}.*mode {mode:o}"):
                read(path)
        path.chmod(0o600)
        read(path)


def test_files_of_another_user_are_refused(files, monkeypatch):
    owner = os.geteuid()
    if owner == 0:
        for path in files.values():
            os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for read, path in files.items():
        with pytest.raises(BadArgument, match="it belongs to another user"):
            read(path)


def test_a_policy_comes_back(tmp_path):
    policy = Policy(server=b"k" * 32, min_records=7, colluders=2, key_hours=1.5)
    assert Policy.read(policy.write(tmp_path / "a.policy")) == policy
    with pytest.raises(BadArgument, match="already exists and will not be overwritten"):
        policy.write(tmp_path / "a.policy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "server must be the server's public key"),
        ('server = "abc"', "server must be the server's public key"),
        (f'server = "{KEY}"\nmin_records = 0', "min_records must be"),
        (f'server = "{KEY}"\nmin_members = 2', "min_members must be"),
        (f'server = "{KEY}"\nkey_hours = 0', "key_hours must be"),
        (f'server = "{KEY}"\nmin_record = 5', "there is no setting 'min_record'"),
        (f'server = "{KEY}"\ncolluders = true', "colluders must be"),
        ("server = [", "is not TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "is not TOML"),
    ],
)
def test_policies_that_make_no_sense_are_refused(tmp_path, text, message):
    (tmp_path / "a.policy").write_text(text)
    with pytest.raises(BadArgument, match=message):
        Policy.read(tmp_path / "a.policy")
