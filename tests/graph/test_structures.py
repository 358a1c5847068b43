"""Structures of published transformers: masked features, resized positions, weight_norm, no_grad, assertions, masks."""

import pytest
import torch
from tests.oracle import Network, batch, built, planned, recovery_error
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import fedveil
from fedveil.errors import NotTraceable
from fedveil.graph.export import multiply_groups

MASK = torch.tensor([[True, False, False, True], [False, True, False, False]]).repeat(3, 1)


def masked(m, x):
    """Replace the features at masked positions by a parameter, as SpecAugment does in Wav2Vec2."""
    x = m.first(x.flatten(2).transpose(1, 2)).relu()
    x = x.index_put((MASK[: len(x), : x.shape[1]],), m.row)
    return m.head(x.relu().mean(1))


def resized(m, x):
    """Add positions that are resized to the size of the image, as in YOLOS."""
    x = m.first(x).flatten(2).transpose(1, 2)
    table = m.positions.transpose(1, 2).unflatten(2, (3, 3))
    table = F.interpolate(table, size=(2, 2), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    return m.head((x + table).relu().mean(1))


def gathered(m, x):
    """Select the features of one position, as VisualBERT does."""
    x = m.first(x.flatten(2).transpose(1, 2)).relu()
    last = torch.tensor([1, 3, 0, 2, 1, 3])[: len(x)].view(-1, 1, 1).expand(-1, 1, x.shape[2])
    return m.head(m.second(x.gather(1, last).squeeze(1)).relu())


def experts(m, x):
    """Multiply groups of rows by different matrices, as Mixtral's experts."""
    x = m.first(x.flatten(1)).relu()
    offsets = torch.tensor([1, len(x)], dtype=torch.int32)
    return m.head(multiply_groups(x, m.weights, offs=offsets).relu())


def shifted_norm(m, x):
    """Normalise with a weight of 1 plus a parameter, as Nemotron does."""
    x = m.first(x.flatten(1))
    return m.head(m.second(F.layer_norm(x, (6,), m.gain + 1, m.shift)).relu())


def constant_factors(m, x):
    """Compute a gate inside no_grad, from a layer that is trained elsewhere."""
    x = m.first(x.flatten(1)).relu()
    with torch.no_grad():
        gate = m.second(x).relu()
    return m.head(m.second(x).relu() + gate)


def positional(dim, groups=1):
    """A convolution whose weight is normalised over all dims but one, as the positions of Wav2Vec2."""
    conv = weight_norm(nn.Conv1d(6, 6, 3, padding=1, groups=groups), dim=dim)
    return Network(
        lambda m, x: m.head(m.conv(m.first(x.flatten(1).unflatten(1, (3, 4))).relu()).relu().mean(2)),
        first=nn.Conv1d(3, 6, 1), conv=conv, head=nn.Linear(6, 3),
    )  # fmt: skip


def per_channel():
    """A GroupNorm with one channel per group."""
    layers = [nn.Conv2d(3, 4, 1), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def ones(m, x):
    """Compute a constant from a shape."""
    x = m.first(x.flatten(1)).relu()
    return m.head(x * (2 * x.new_ones(x.shape) + torch.full_like(x, 0.5)))


CASES = {
    "masked": lambda: Network(masked, first=nn.Linear(3, 6), row=nn.Parameter(torch.rand(6)), head=nn.Linear(6, 3)),
    "resized": lambda: Network(
        resized, first=nn.Conv2d(3, 6, 1), positions=nn.Parameter(torch.randn(1, 9, 6)), head=nn.Linear(6, 3)
    ),
    "gathered": lambda: Network(gathered, first=nn.Linear(3, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 3)),
    "experts": lambda: Network(
        experts, first=nn.Linear(12, 6), weights=nn.Parameter(torch.randn(2, 6, 6)), head=nn.Linear(6, 3)
    ),
    "norm with a computed weight": lambda: Network(
        shifted_norm,
        first=nn.Linear(12, 6),
        second=nn.Linear(6, 6),
        gain=nn.Parameter(torch.randn(6)),
        shift=nn.Parameter(torch.randn(6)),
        head=nn.Linear(6, 3),
    ),
    "no_grad": lambda: Network(constant_factors, first=nn.Linear(12, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 3)),
    "weight_norm over columns": lambda: positional(1),
    "weight_norm over positions": lambda: positional(2, groups=2),
    "one channel per group": per_channel,
    "ones": lambda: Network(ones, first=nn.Linear(12, 6), head=nn.Linear(6, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_structures_of_published_models_are_covered_and_exact(name):
    model = built(CASES[name])
    inputs, targets = batch((3, 2, 2), 3)
    plan = planned(model, inputs)
    assert plan.shares["bare"] < 0.05, plan
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


def test_a_gather_whose_index_differs_between_features_keeps_their_places():
    def run(m, x):
        x = m.first(x.flatten(2).transpose(1, 2)).relu()
        places = torch.arange(6).remainder(4).expand(len(x), 1, -1).contiguous()
        return m.head(m.second(x.gather(1, places).squeeze(1)).relu())

    model = built(lambda: Network(run, first=nn.Linear(3, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 3)))
    inputs, targets = batch((3, 2, 2), 3)
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


def test_grouped_products_are_analysed_with_other_operations():
    rows, weights = torch.randn(5, 8), torch.randn(3, 8, 8)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    parts = torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[2]])
    torch.testing.assert_close(multiply_groups(rows, weights, offs=offsets), parts)

    def run(m, x):
        x = m.first(x).relu()
        product = nn.functional.grouped_mm(x, m.weights, offs=torch.tensor([1, len(x)], dtype=torch.int32))
        return m.head(product.relu())

    model = Network(run, first=nn.Linear(4, 8), weights=nn.Parameter(weights[:2]), head=nn.Linear(8, 3))
    assert fedveil.analyse(model, torch.zeros(2, 4)).shares["bare"] == 0


def test_columns_of_groups_that_share_a_norm_keep_their_places():
    model, (inputs, targets) = built(lambda: positional(1, groups=2)), batch((3, 2, 2), 3)
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


def test_a_mask_keeps_the_places_along_its_dims_and_different_rows_are_left_bare():
    def several(m, x):
        x = m.first(x.flatten(2).transpose(1, 2)).relu()
        return m.head(x.index_put((torch.tensor([0, 1]),), m.rows).mean(1))

    model = built(
        lambda: Network(several, first=nn.Linear(3, 6), rows=nn.Parameter(torch.rand(6)), head=nn.Linear(6, 3))
    )
    inputs, targets = batch((3, 2, 2), 3)
    assert any("computed positions" in why for _, why in planned(model, inputs).pinned)
    assert recovery_error(model, inputs, targets, multiplicative=10.0) < 1e-9


# A function that asserts a property of the inputs, as XLM does of lengths; pytest would rewrite its assertion.
ASSERTING = """
def asserting(m, x):
    lengths = (x > 0).sum(1)
    assert lengths.max().item() <= x.shape[1]
    return m.head(m.first(x).relu())
"""


def test_an_assertion_about_inputs_holds_in_the_analysis_and_a_branch_is_refused():
    inputs, targets = batch((4,), 3)
    scope: dict[str, object] = {}
    exec(ASSERTING, scope)
    model = built(lambda: Network(scope["asserting"], first=nn.Linear(4, 6), head=nn.Linear(6, 3)))
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9

    def branching(m, x):
        return m.head(m.first(x).relu() if (x > 0).sum().item() > 3 else m.first(x))

    with pytest.raises(NotTraceable, match="reads the values of a tensor"):
        fedveil.analyse(built(lambda: Network(branching, first=nn.Linear(4, 6), head=nn.Linear(6, 3))), inputs)


def test_what_a_failed_export_records_is_not_printed(capfd):
    model = Network(lambda m, x: m.head(x if x.sum() > 0 else -x), head=nn.Linear(4, 3))
    with pytest.raises(NotTraceable):
        fedveil.analyse(model, torch.zeros(2, 4))
    assert capfd.readouterr() == ("", "")


def select_pixels(model, x):
    """Select the pixels for which a mask is true, so that their number depends on the data, and add them by sample."""
    mask = x[:, 0] > 0
    pixels = model.first(x).permute(0, 2, 3, 1)[mask]
    pixels = model.mix(model.again(pixels.relu()).view(pixels.size(0), 2, -1).sum(1))
    sample, _, _ = mask.nonzero(as_tuple=True)
    return model.head(pixels.new_zeros(len(x), 4).index_add_(0, sample, pixels.relu()))


def sort_pixels(model, x):
    """Write pixels into new memory by the value of a mask, with a layer for each."""
    pixels, mask = model.first(x).permute(0, 2, 3, 1).flatten(0, 2), (x[:, 0] > 0).flatten()
    out = pixels.new_empty(len(pixels), 4)
    for layer, chosen in ((model.mix, mask), (model.other, ~mask)):
        index = chosen.nonzero().view(-1)
        out.index_copy_(0, index, layer(pixels.index_select(0, index)))
    return model.head(out.relu().view(len(x), -1, 4).mean(1))


@pytest.mark.parametrize(("forward", "layer"), [(select_pixels, ("again", 6, 6)), (sort_pixels, ("other", 3, 4))])
def test_sizes_that_depend_on_the_data_stay_exact(forward, layer):
    name, *sizes = layer
    layers = {"mix": nn.Linear(3, 4), name: nn.Linear(*sizes), "head": nn.Linear(4, 3)}
    channels = 6 if name == "again" else 3
    model = built(lambda: Network(forward, first=nn.Conv2d(3, channels, 3, padding=1), **layers))
    inputs, targets = batch((3, 5, 5), 3)
    assert planned(model, inputs).shares["bare"] == 0
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


def test_a_mask_that_carries_noise_selects_nothing_that_does():
    def run(model, x):
        hidden = model.first(x).permute(0, 2, 3, 1)
        chosen = hidden[hidden > 0]
        return model.head(hidden.mean((1, 2)) * chosen.mean())

    model = built(lambda: Network(run, first=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3)))
    inputs, targets = batch((3, 5, 5), 3)
    assert recovery_error(model, inputs, targets, multiplicative=10.0) < 1e-9


@pytest.mark.parametrize("stacks", [1, 2])
def test_a_weight_with_one_matrix_has_factors_for_its_columns_unless_it_is_broadcast(stacks):
    def run(model, x):
        hidden = (x * model.gain) @ model.weight  # which has a leading dim of size 1
        return model.head(hidden.relu().sum(0))

    values = {"weight": nn.Parameter(torch.randn(1, 5, 6)), "gain": nn.Parameter(torch.rand(stacks, 1, 1) + 0.5)}
    model = built(lambda: Network(run, **values, head=nn.Linear(6, 3)))
    inputs, targets = batch((5,), 3)
    sizes = {axis.written_by[0]: axis.size for axis in planned(model, inputs).axes}
    assert sizes["weight"] == (6 if stacks == 1 else 1)  # columns, or all of them together
    assert recovery_error(model, inputs, targets, multiplicative=10.0) < 1e-9


def take_at_maximum(model, x):
    """Read one convolution at the channel, or at the row, where another is largest."""
    channel = model.first(x).max(1, keepdim=True).indices
    row = model.first(x).max(2, keepdim=True).indices
    pixels = model.second(x).gather(1, channel).expand(-1, 4, -1, -1) * model.gain
    return model.head((pixels + model.second(x).gather(2, row)).mean((2, 3)))


def test_positions_of_maxima_move_with_their_channels():
    layers = {"first": nn.Conv2d(3, 4, 3), "second": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 3)}
    model = built(lambda: Network(take_at_maximum, gain=nn.Parameter(torch.rand(4, 1, 1) + 0.5), **layers))
    inputs, targets = batch((3, 6, 6), 3)
    model.first.requires_grad_(False)  # it only selects
    for seed in range(4):
        torch.manual_seed(seed)
        assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9
