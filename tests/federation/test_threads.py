"""A federation is used by one thread at a time; a second one is told so."""

import copy
import pickle
import threading

import pytest
from tests.small import federation

from fedveil.defences import Plain, Veil
from fedveil.errors import FedveilError


def elsewhere(call):
    """What a call raises in another thread; None if it does not."""
    found = []

    def work():
        try:
            found.append(call())
        except BaseException as error:
            found[:] = [error]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0] if isinstance(found[0], BaseException) else None


@pytest.mark.parametrize("make", [Plain, Veil])
def test_three_others_are_refused_while_one_trains_and_its_rounds_stay_right(tmp_path, make):
    run, alone, seen = federation(make()), federation(make()), []
    run.fit(rounds=1, folder=tmp_path / "before")
    alone.fit(rounds=4)

    def disturb(record):
        if not seen:
            calls = (run.step, lambda: run.fit(rounds=9), lambda: run.save(tmp_path / "other"))
            seen.extend(elsewhere(call) for call in (*calls, lambda: run.resume(tmp_path / "before")))

    run.fit(rounds=4, on_round=disturb)
    assert len(seen) == 4
    for error in seen:
        assert isinstance(error, FedveilError)
        assert "Federation: another thread is using it" in str(error)
        assert "Fix: wait until it is done" in str(error)
    assert not (tmp_path / "other").exists()
    assert [record["round"] for record in run.history.records] == [1, 2, 3, 4]
    assert run.round == alone.round
    assert elsewhere(run.step) is None  # nobody is inside any more
    assert run.round == 5


def test_a_thread_that_failed_lets_the_next_one_in_and_callbacks_may_call_what_they_like(tmp_path):
    run = federation()

    def stop(record):
        run.save(tmp_path)
        run.step()
        assert isinstance(elsewhere(run.step), FedveilError)  # still, after the calls inside have returned
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.fit(rounds=3, on_round=stop)
    assert elsewhere(run.step) is None
    assert run.round == 3


def test_a_copy_is_used_by_another_thread():
    run, copies = federation(), []

    def keep(record):
        copies.extend([copy.deepcopy(run), pickle.loads(pickle.dumps(run))])
        assert [elsewhere(other.step) for other in copies] == [None, None]
        assert isinstance(elsewhere(run.step), FedveilError)

    run.fit(rounds=1, on_round=keep)
    assert [run.round, *(other.round for other in copies)] == [1, 2, 2]
