"""Random small networks for property tests: convolutions, norms, skips, concatenations, shuffles, all mixed."""

import torch
from hypothesis import strategies as st
from tests.oracle import Network
from torch import Tensor, nn
from torch.nn import functional as F


def residual(inner: nn.Module, form: int) -> nn.Module:
    def run(model, x):  # type: ignore[no-untyped-def]
        out = model.inner(x)
        if form < 2:
            return x + out if form == 0 else torch.add(out, x)
        out = out.clone()
        out += x
        return out

    return Network(run, inner=inner)


def halves(inner: nn.Module, form: int) -> nn.Module:
    def run(model, x):  # type: ignore[no-untyped-def]
        half = x.shape[1] // 2
        forms = (x.chunk(2, 1), torch.split(x, half, dim=1), (x[:, :half], x[:, half:]))
        a, b = forms[form]
        return torch.cat([b, model.inner(a)], 1)

    return Network(run, inner=inner)


def shuffled(x: Tensor, groups: int = 2) -> Tensor:
    n, c, h, w = x.size()
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)


def gated(channels: int) -> nn.Module:
    gate = nn.Linear(channels, channels)
    return Network(lambda m, x: x * torch.sigmoid(m.gate(x.mean((2, 3))))[:, :, None, None], gate=gate)


def applied(function) -> nn.Module:  # type: ignore[no-untyped-def]
    return Network(lambda _, x: function(x))


ACTIVATIONS = [
    nn.ReLU, lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.3), nn.Tanh, nn.GELU, nn.SiLU, nn.Identity,
    lambda: applied(F.relu), lambda: applied(torch.relu), lambda: applied(lambda x: x.relu()), nn.Hardtanh,
]  # fmt: skip


@st.composite
def convolutions(draw, before: int, after: int) -> nn.Module:  # type: ignore[no-untyped-def]
    groups = draw(st.sampled_from([g for g in (1, 2, before) if before % g == 0 and after % g == 0]))
    kernel = draw(st.sampled_from([1, 3]))
    norms = {
        "none": nn.Identity,
        "batch": lambda: nn.BatchNorm2d(after),
        "instance": lambda: nn.InstanceNorm2d(after, affine=draw(st.booleans())),
        "group": lambda: nn.GroupNorm(2 if after % 2 == 0 else 1, after),
        "frozen batch": lambda: nn.BatchNorm2d(after).eval(),
        "plain batch": lambda: nn.BatchNorm2d(after, affine=False, track_running_stats=draw(st.booleans())),
    }
    normed = draw(st.sampled_from(list(norms)))
    conv = nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=normed == "none")
    norm = norms[normed]()
    if normed == "frozen batch":
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    choices = [*ACTIVATIONS, lambda: nn.PReLU(after)]
    return nn.Sequential(conv, norm, draw(st.sampled_from(choices))())


@st.composite
def networks(draw) -> tuple[nn.Module, tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """A network with four outputs, in float64, and the shape of one input."""
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 2**32)))
        channels = 4
        stack = [draw(convolutions(3, channels))]
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["conv", "residual", "beside", "halves", "shuffle", "pad", "pool", "gate"]))
            form = draw(st.integers(0, 2))
            if kind == "conv":
                stack.append(draw(convolutions(channels, after := draw(st.sampled_from([4, 6])))))
                channels = after
            elif kind == "residual":
                stack.append(residual(draw(convolutions(channels, channels)), form))
            elif kind == "beside" and channels < 12:
                stack.append(Network(lambda m, x: torch.cat([m.inner(x), x], 1), inner=draw(convolutions(channels, 4))))
                channels += 4
            elif kind == "halves":
                stack.append(halves(draw(convolutions(channels // 2, channels // 2)), form))
            elif kind == "shuffle":
                stack.append(applied(shuffled))
            elif kind == "pad" and channels < 12:
                stack.append(applied(lambda x, ends=(0, 0, 0, 0, form, 2 - form): F.pad(x, ends)))
                channels += 2
            elif kind == "pool":
                pools = [nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Dropout(0.0)]
                stack.append(pools[form])
            elif kind == "gate":
                stack.append(gated(channels))
        if draw(st.booleans()):
            end = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 6), nn.LayerNorm(6), nn.ReLU()]
            tail = [*end, nn.Linear(6, 4, bias=draw(st.booleans()))]
        else:
            tail = [applied(lambda x: x.mean((2, 3))), nn.Linear(channels, 4)]
        return nn.Sequential(*stack, *tail).double(), (3, 5, 5)
