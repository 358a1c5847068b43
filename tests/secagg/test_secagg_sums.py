"""Sums are exact, whoever vanishes, as long as enough stay."""

import itertools
import random

import numpy as np
import pytest
from tests.secagg.group import DIGEST, STAGES, Attempt, Group, attempt, reveal_all, settle_all, summed, upload

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Tally, threshold


def patterns(count):
    """All ways for `count` clients to vanish before upload, settle or reveal."""
    for gone in itertools.combinations(range(10), count):
        for stages in itertools.product(STAGES, repeat=count):
            yield {f"c{place}": stage for place, stage in zip(gone, stages, strict=True)}


UP_TO_THREE = [pattern for count in (1, 2, 3) for pattern in patterns(count)]  # 3,675
FOUR = list(patterns(4))  # 17,010


@pytest.fixture(scope="module")
def ten():
    """Ten clients that have uploaded, and what they remember of that: every pattern goes on from here."""
    group = Group(10)
    opening, vectors = group.opening(), group.vectors()
    sent = group.uploads(opening, vectors)
    return group, opening, vectors, sent, group.snapshot()


@pytest.mark.parametrize("count", [48, pytest.param(len(UP_TO_THREE), marks=pytest.mark.slow)])
def test_up_to_three_of_ten_vanish_and_the_sum_is_exact(ten, count):
    """The sum over those who had not vanished before the last settling, in one attempt."""
    group, opening, vectors, sent, kept = ten
    for pattern in random.Random(0).sample(UP_TO_THREE, count):
        group.restore(kept)
        tally = attempt(group, opening, sent, pattern)
        stayed = [name for name in group.names if pattern.get(name, "reveal") == "reveal"]
        assert list(tally.survivors) == stayed
        assert np.array_equal(tally.total(), summed(vectors, stayed))


@pytest.mark.parametrize("count", [25, pytest.param(len(FOUR), marks=pytest.mark.slow)])
def test_four_of_ten_vanish_and_the_attempt_aborts(ten, count):
    group, opening, _, sent, kept = ten
    for pattern in random.Random(5).sample(FOUR, count):
        group.restore(kept)
        with pytest.raises(Aborted, match=r"6 of 10 clients (remain|have revealed): at least 7") as caught:
            attempt(group, opening, sent, pattern).total()
        assert caught.value.reason == "few"


@pytest.mark.parametrize("n", [3, 4, 5, 7])
def test_as_many_as_the_threshold_allows_vanish_one_by_one(n):
    """Each settling loses one more, so that as many steps are needed as can be."""
    a = Attempt(n)
    spare = a.group.names[: n - threshold(n)]
    for lost in [*spare, None]:
        common, own = a.tally.settle()
        for name in own.keys() - {lost}:
            a.tally.take_settle_reply(name, a.group.parties[name].settle(common, own[name]))
        assert a.tally.has_agreement() == (lost is None)
    reveal_all(a.group, a.tally)
    assert a.tally.survivors == tuple(a.group.names[len(spare) :])
    assert a.exact()


@pytest.mark.parametrize("n", [4, 10])
def test_uploads_are_at_most_2_05_times_float32(n):
    group, size = Group(n), 270_000
    opening = group.opening(size=size + 1)
    vector = np.ones(size + 1, np.uint64)
    data = upload(group.parties["c0"], opening, DIGEST, vector)
    assert len(data) <= 2.05 * 4 * size


def test_steps_out_of_order_are_refused():
    a = Attempt(4)
    fresh = Tally(a.opening, DIGEST, a.group.roster)
    with pytest.raises(Aborted, match="0 of 4 clients remain: at least 3"):
        fresh.settle()
    for call in (fresh.reveal, fresh.total, lambda: a.tally.take_upload("c0", a.sent["c0"])):
        with pytest.raises(BadArgument):
            call()
    settle_all(a.group, a.tally)
    for call in (a.tally.settle, a.tally.total):
        with pytest.raises(BadArgument):
            call()
    reveal_all(a.group, a.tally)
    with pytest.raises(BadArgument, match="unexpected message from 'c0'"):
        a.tally.take_upload("c0", a.sent["c0"])
