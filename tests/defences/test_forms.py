"""Every defence takes inputs of every form: the same run as with one tensor, or a refusal that says why not."""

import pytest
import torch
from tests.defences.runs import DEFENCES
from tests.federation.test_positions import draw, pixelwise
from tests.forms import FORMS, Apart, Whole, Words, network, records, reformed
from tests.oracle import built, worst
from torch import nn

from fedveil import Entropy, Federation
from fedveil.defences import DBCL, SPN, Plain, Private, Veil
from fedveil.errors import BadArgument

EVERY = {
    **{name: DEFENCES[name] for name in ("plain", "ppdl", "dbcl", "spn")},
    "private": lambda: Private(Plain(), 0.5, 0.0),
    "private spn": lambda: Private(SPN(seed=1), 0.5, 0.0),
    "private veil": lambda: Private(Veil(additive=100.0, entropy=Entropy.for_tests(0)), 0.5, 0.0),
}


def trained(kind, clients, defence, rounds=4, **options):
    federation = Federation(network(kind), clients, defence, lambda p: torch.optim.SGD(p, 0.1), batch_size=8, **options)
    federation.fit(rounds=rounds)
    return {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}


@pytest.mark.parametrize("whole_shard", [False, True], ids=["batches", "shards"])
@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("name", EVERY)
def test_the_run_is_the_one_with_a_single_tensor(name, form, whole_shard):
    (kind, change), parts = FORMS[form], records((10, 14), classes=True)
    bound = 1e-9 if "veil" in name else 1e-12
    found = trained(kind, reformed(parts, change), EVERY[name](), whole_shard=whole_shard)
    assert worst(found, trained(Whole, parts, EVERY[name](), whole_shard=whole_shard)) < bound


class Normed(Apart):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, a, b):
        return self.net(self.norm(torch.cat([a, b], 1)))


@pytest.mark.parametrize("defence", [Plain, lambda: SPN(seed=1)], ids=["plain", "spn"])
def test_statistics_of_batches_follow_the_inputs(defence):
    parts = records((10, 14), classes=True)
    found = trained(Normed, reformed(parts, FORMS["dict"][1]), defence(), whole_shard=True, rounds=1)
    means = [0.9 * 0.1 * x[:8].mean(0) + 0.1 * x[8:].mean(0) for x, _ in parts]  # of two batches, from 0
    torch.testing.assert_close(found["norm.running_mean"], (10 * means[0] + 14 * means[1]) / 24)


def test_what_a_defence_cannot_take_is_refused_with_a_fix():
    ids = torch.randint(0, 7, (6, 3), generator=torch.Generator().manual_seed(0))
    words = [((draw(6, 6), ids), draw(6, 3, classes=4))]
    with pytest.raises(BadArgument, match=r"buffer norm.running_mean depends on the clients' data"):
        trained(Normed, reformed(records((10,)), FORMS["dict"][1]), Private(Plain(), 0.5, 0.0))
    with pytest.raises(BadArgument, match=r"(?s)parameters of Embedding cannot be sketched.*DBCL\(skip=\('words',\)"):
        trained(Words, words, DBCL())
    assert set(trained(Words, words, DBCL(skip=("words",)), rounds=1)) == set(built(Words).state_dict())
    plain = trained(Words, words, Plain(), loss="cross_entropy")
    assert worst(trained(Words, words, SPN(0.0, seed=1), loss="cross_entropy"), plain) < 1e-12
    with pytest.raises(BadArgument, match=r"SPN needs a model that ends with a Linear"):
        Federation(built(pixelwise(3)), [(draw(4, 2, 4, 5), draw(4, 4, 5, classes=3))], SPN(), loss="cross_entropy")
