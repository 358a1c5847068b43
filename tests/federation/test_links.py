"""Links in a run's folder lead to files of the user: none of those is ever written to."""

import os

import pytest
from tests.small import federation

from fedveil.errors import BadArgument
from fedveil.locks import locked


@pytest.mark.parametrize("name", [".lock", ".holder"])
@pytest.mark.parametrize("target", ["notes.txt", "nowhere.txt"])
def test_a_link_in_the_place_of_the_lock_or_its_holder_is_refused(tmp_path, name, target):
    notes, folder = tmp_path / "notes.txt", tmp_path / "run"
    notes.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / target)
    for write in (lambda: federation().fit(rounds=1, folder=folder), lambda: federation().save(folder)):
        with pytest.raises(BadArgument, match=rf"(?s){name}: it is a link.*Fix: remove it"):
            write()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.txt"]
    assert notes.read_text() == "mine"
    assert (folder / name).is_symlink()


def test_a_second_name_of_a_file_in_the_place_of_the_holder_is_not_written_to(tmp_path):
    notes, folder = tmp_path / "notes.txt", tmp_path / "run"
    notes.write_text("mine")
    folder.mkdir()
    os.link(notes, folder / ".holder")
    with locked(folder):
        assert str(os.getpid()) in (folder / ".holder").read_text()
    assert notes.read_text() == "mine"
