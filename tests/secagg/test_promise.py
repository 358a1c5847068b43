"""The promise, over every strategy of a hostile server: nothing opens but sums over at least t - c honest clients.

A model of the protocol without its cryptography: masks are edges and lids of a graph. Which lists of members a client
signs, one after another, is asked of the rules themselves. The server shows every honest client any lists it likes,
collects signatures, and has c clients that sign and tell everything.
"""

import itertools

import pytest

from fedveil.errors import Aborted
from fedveil.secagg import colluders, rules, threshold
from fedveil.secagg.memory import Current
from fedveil.secagg.messages import Settle


def histories(n, name):
    """All that one client may sign: tuples of (step, members), the first being step 0."""
    names = tuple(f"c{place}" for place in range(n))
    lists = [m for size in range(1, n + 1) for m in itertools.combinations(names, size)]
    found, open_ends = [()], [()]
    while open_ends:
        longer = []
        for past in open_ends:
            current = Current(b"", 0, names, (), b"", len(past) - 1, past[-1][1] if past else names)
            for members in lists:
                settle = Settle(b"", len(past), members)
                if allowed(current, settle, name) and (not past or members != past[-1][1]):
                    longer.append((*past, (len(past), members)))
        found += longer
        open_ends = longer
    return found


def allowed(current, settle, name):
    try:
        rules.next_step(current, settle)
        rules.inside(current, settle.members)
        rules.many_left(current, settle.members, name)
    except Aborted:
        return False
    return True


def smallest_sum(n, c, signatures=True):
    """The fewest honest clients whose sum opens, over all strategies; None if nothing opens."""
    t = threshold(n)
    honest = [f"c{place}" for place in range(n - c)]
    own = [histories(n, name) for name in honest]
    least = None
    for pasts in itertools.product(*own):
        last = [past[-1] if past else None for past in pasts]
        signed = [sum(end in past for past in pasts) + c if end else 0 for end in last]
        can = [bool(end) and (not signatures or count >= t) for end, count in zip(last, signed, strict=True)]
        for groups in opened(honest, last, can, t - c):
            least = min(groups, least or n)
    return least


def opened(honest, last, can, needed):
    """Sizes of the groups of honest clients whose lids are all off; everyone who can reveals, which only helps."""
    left = [set(end[1]) if end else None for end in last]
    for group in linked(honest, left):
        lids = [sum(ok and name in members for ok, members in zip(can, left, strict=True)) for name in group]
        if all(count >= needed for count in lids):
            yield len(group)


def linked(honest, left):
    """Groups of honest clients between which pair masks were not opened by either end."""
    seen = set()
    for start in honest:
        if start in seen:
            continue
        group, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for other in honest:
                if other not in group and hidden(honest, left, here, other):
                    group.add(other)
                    todo.append(other)
        seen |= group
        yield group


def hidden(honest, left, one, other):
    ours, theirs = left[honest.index(one)], left[honest.index(other)]
    return (ours is None or other in ours) and (theirs is None or one in theirs)


@pytest.mark.parametrize("n", [4, 5, 6])
def test_only_sums_over_t_minus_c_honest_clients_open(n):
    c = colluders(n)
    assert smallest_sum(n, c) == threshold(n) - c


@pytest.mark.slow
@pytest.mark.parametrize(("n", "c"), [(5, 1), (6, 2), (6, 1)])
def test_only_sums_over_t_minus_c_honest_clients_open_in_larger_rosters(n, c):
    assert smallest_sum(n, c) >= threshold(n) - c


def test_one_colluder_more_opens_a_single_client():
    assert smallest_sum(4, 2) == 1


def test_without_signatures_a_single_client_opens():
    assert smallest_sum(4, 1, signatures=False) == 1


def test_without_the_rule_that_nobody_comes_back_a_single_client_opens(monkeypatch):
    """The lists then need not shrink; two steps are enough."""
    names = tuple(f"c{place}" for place in range(4))
    without = [Settle(b"", 0, names[:3]), Settle(b"", 1, names)]
    current = Current(b"", 0, names, (), b"", 0, names[:3])
    assert not allowed(current, without[1], "c0")
    monkeypatch.setattr(rules, "inside", lambda current, members: None)
    assert allowed(current, without[1], "c0")
