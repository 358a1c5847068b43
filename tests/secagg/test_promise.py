"""The promise, over every strategy of a hostile server: nothing opens but sums over at least t - c honest clients.

A model of the protocol without its cryptography: masks are edges and lids of a graph. Which lists of members a client
signs, one after another, is asked of the rules themselves. The server shows every honest client any lists it likes,
collects signatures, and has c clients that sign and tell everything.

Why it holds for every n, if 2t > n + c. K_j is the list that honest j signed last (all, if none). j and k are linked if
each is in the other's list: only then is their pair mask shut. Let C be a group of linked clients whose self seeds are
all open, and R the honest clients that revealed. A revealed list has t - c honest signers. Two such lists have a signer
in common, because 2(t - c) > n - c; so lists of R are nested, one inside another.

  1. C holds a client of R: for k in C, t - c of R have k in their lists, and K_k holds t - c honest clients; some r is
     in both, and is linked to k. Take r in C and R with the largest list.
  2. The t - c clients of R that opened r have r in their lists. Those with lists inside K_r are linked to r: call them
     B (r is one of them). The others, A, are outside K_r, or they would be in C with a larger list.
  3. Let L be the smallest list of B, and S its t - c honest signers. If all of S are in C, C is large enough. If j of S
     is not, then j is in all lists of B, so j has dropped all of B: K_j is inside L without B, and has t members.
  4. So L has t + |B in L| members, and A and the rest of B are outside L: |A| + |B| <= n - t. But A and B are the t - c
     that opened r: 2t <= n + c, which was excluded.
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
            current = Current(b"", 0, b"", names, (), b"", len(past) - 1, past[-1][1] if past else names)
            for members in lists:
                settle = Settle(b"", len(past), members)
                if allowed(current, settle, name) and (not past or members != past[-1][1]):
                    longer.append((*past, (len(past), members)))
        found += longer
        open_ends = longer
    return found


def allowed(current, settle, name):
    try:
        rules.check_step(current, settle)
        rules.check_members(current, settle.members)
        rules.check_survivors(current, settle.members, name)
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


@pytest.mark.parametrize("n", [3, 4, 5, 6])
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
