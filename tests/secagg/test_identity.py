"""Identities and rosters: files that come back, and those that are refused."""

import copy
import pickle

import pytest

from fedveil.errors import BadArgument
from fedveil.secagg import Identity, Roster

KEY = "ab" * 32


def test_an_identity_comes_back_and_signs_alike(tmp_path):
    identity = Identity.new("alice")
    found = Identity.load(identity.save(tmp_path / "a.key"))
    assert (found.name, found.public()) == ("alice", identity.public())
    roster = Roster({"alice": identity.public()})
    assert roster.verifies("alice", found.sign(b"x"), b"x")
    assert not roster.verifies("alice", found.sign(b"x"), b"y")
    assert not roster.verifies("bob", found.sign(b"x"), b"x")


def test_an_identity_is_neither_pickled_nor_copied_nor_shown():
    identity = Identity.new("alice")
    assert repr(identity) == "Identity('alice')"
    for leave in (pickle.dumps, copy.copy):
        with pytest.raises(BadArgument, match="a private key is not pickled"):
            leave(identity)


def test_a_roster_comes_back(tmp_path):
    roster = Roster({name: Identity.new(name).public() for name in ("zoe", "alice")})
    assert Roster.read(roster.write(tmp_path / "roster")) == roster
    assert roster.names == ("zoe", "alice")
    assert repr(roster) == "Roster(zoe, alice)"
    with pytest.raises(BadArgument, match="'bob' is not in it"):
        roster.key_of("bob")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "line 1: a line is a name and a public key"),
        (f"\nalice {KEY[:-1]}", "line 2: a line is a name and a public key"),
        (f"alice {KEY} more", "a line is a name and a public key"),
        (f"al/ice {KEY}", "line 1: a member's name has"),
        (f"alice {KEY}\nalice {'cd' * 32}", "line 2: alice is listed twice"),
        (f"alice {KEY}\nbob {KEY}", "two members have the same public key"),
    ],
)
def test_rosters_that_make_no_sense_are_refused(tmp_path, text, message):
    (tmp_path / "roster").write_text(text)
    with pytest.raises(BadArgument, match=message):
        Roster.read(tmp_path / "roster")


def test_a_roster_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "roster").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "roster", tmp_path / "none", tmp_path):
        with pytest.raises(BadArgument, match=r"cannot be read|is not a text file"):
            Roster.read(path)
