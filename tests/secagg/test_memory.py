"""A client's memory: on disk before an answer leaves, for its owner alone, and for one process at a time."""

import json
import stat

import numpy as np
import pytest
from tests.secagg.group import DIGEST, Group, attempt, settle_all, summed, upload, words
from tests.secagg.hostile import refuses

from fedveil.errors import BadArgument
from fedveil.secagg import Memory, Party, Tally


class Restarted(Group):
    """Clients that are new processes for every message: nothing is left of them but their files."""

    def __init__(self, n, folder):
        super().__init__(n)
        self.folder, self.parties = folder, self
        self.hellos = {name: self[name].hello(self.run) for name in self.names}

    def __getitem__(self, name):
        return Party(self.identities[name], self.roster, Memory(self.folder / f"{name}.json"))


def test_a_new_process_for_every_message_gives_the_same_sum(tmp_path):
    group = Restarted(4, tmp_path)
    opening, vectors = group.opening(), group.vectors()
    tally = attempt(group, opening, group.uploads(opening, vectors), {"c2": "settle"})
    assert np.array_equal(tally.total(), summed(vectors, ("c0", "c1", "c3")))
    assert refuses(upload, group.parties["c0"], opening, DIGEST, vectors["c0"]) == "attempt"
    again = group.opening(round=0)
    assert refuses(upload, group.parties["c0"], again, DIGEST, vectors["c0"]) == "round"
    assert refuses(group.parties["c0"].reveal, tally.reveal()) == "attempt"


def test_a_run_has_one_key_in_a_file_for_its_owner_alone(tmp_path):
    group, path = Restarted(4, tmp_path), tmp_path / "c0.json"
    assert group.parties["c0"].hello("another").key != group.hellos["c0"].key
    assert group.parties["c0"].hello(group.run) == group.hellos["c0"]  # and is not forgotten over the other
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(BadArgument, match="others can read or change this private file"):
        group.parties["c0"].hello(group.run)
    with pytest.raises(BadArgument):
        Party(group.identities["c0"], group.roster, Memory(path / "m.json")).hello("run")


@pytest.mark.parametrize("step", ["hello", "upload", "settle", "reveal"])
def test_nothing_leaves_that_could_not_be_written(tmp_path, monkeypatch, step):
    """If the disk is full, no answer leaves; without that order the client would answer and forget."""
    group = Restarted(4, tmp_path)
    opening, vectors = group.opening(), group.vectors()
    tally = Tally(opening, DIGEST, group.roster)
    for name, data in group.uploads(opening, vectors).items():
        tally.take_upload(name, data)
    if step == "reveal":
        settle_all(group, tally)
    common, own = tally.settle() if step == "settle" else (b"", {})
    later = group.opening()
    calls = {
        "hello": lambda: group.parties["c0"].hello("another run"),
        "upload": lambda: upload(group.parties["c0"], later, DIGEST, vectors["c0"]),
        "settle": lambda: group.parties["c0"].settle(common, own["c0"]),
        "reveal": lambda: group.parties["c0"].reveal(tally.reveal()),
    }
    before = (tmp_path / "c0.json").read_text()

    def full(*arguments):
        raise BadArgument("disk", "cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedveil.secagg.memory.write_atomically", full)
        with pytest.raises(BadArgument, match="No space left"):
            calls[step]()
    assert (tmp_path / "c0.json").read_text() == before
    assert calls[step]()  # with space again, it answers


def test_two_at_once_are_refused(tmp_path):
    """Two processes at once could be shown two lists of members."""
    memory = Memory(tmp_path / "m.json")
    with memory.turn():
        for other in (memory, Memory(tmp_path / "m.json")):
            assert refuses(taken, other) == "busy"
    taken(memory)


def taken(memory):
    with memory.turn():
        pass


def test_a_memory_belongs_to_one_member(tmp_path):
    group, path = Group(4), tmp_path / "m.json"
    Party(group.identities["c0"], group.roster, Memory(path)).hello("run")
    other = Party(group.identities["c1"], group.roster, Memory(path))
    with pytest.raises(BadArgument, match="belongs to a member other than c1"):
        other.hello("run")
    assert refuses(upload, other, group.opening(), DIGEST, words(1, 2)) == "run"


@pytest.mark.parametrize("text", ["x", "[]", "{}", '{"format":3}', '{"format":2,"member":null,"runs":{"a":{}}}'])
def test_a_damaged_memory_is_refused(text):
    with pytest.raises(BadArgument, match="this memory is damaged"):
        Memory.from_bytes(text.encode())


def test_a_memory_with_a_damaged_value_is_refused():
    group = Group(4)
    group.uploads(group.opening(), group.vectors())
    whole = group.memories["c0"].to_bytes()
    whole_again = Memory.from_bytes(changed(whole, lambda run: None))  # for a client that stores its state elsewhere
    assert Party(group.identities["c0"], group.roster, whole_again).hello(group.run) == group.hellos["c0"]
    for change in (
        lambda run: run.update(key="abc"),
        lambda run: run.update(key="ab" * 31),
        lambda run: run["current"].update(own="ab"),
        lambda run: run.update(attempt="abc"),
        lambda run: run.pop("attempt"),  # a key must not outlive its counter
    ):
        with pytest.raises(BadArgument, match="damaged"):
            Memory.from_bytes(changed(whole, change))


def changed(memory, change):
    state = json.loads(memory)
    change(state["runs"]["a run"])
    return json.dumps(state, separators=(",", ":")).encode()
