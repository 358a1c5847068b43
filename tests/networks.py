"""Random small networks for property tests: convolutions, norms, skips, concatenations, shuffles, all mixed."""

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, form: int) -> None:
        super().__init__()
        self.inner = inner
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.form == 0:
            return x + out
        if self.form == 1:
            return torch.add(out, x)
        out = out.clone()
        out += x
        return out


class Beside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x), x], dim=1)


class Halves(nn.Module):
    def __init__(self, inner: nn.Module, form: int) -> None:
        super().__init__()
        self.inner = inner
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        if self.form == 0:
            a, b = x.chunk(2, 1)
        elif self.form == 1:
            a, b = torch.split(x, half, dim=1)
        else:
            a, b = x[:, :half], x[:, half:]
        return torch.cat([b, self.inner(a)], 1)


class Shuffled(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.size()
        x = x.view(n, self.groups, c // self.groups, h, w)
        return x.transpose(1, 2).contiguous().view(n, -1, h, w)


class Padded(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.pad = (0, 0, 0, 0, before, after)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pad)


class Function(nn.Module):
    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]


ACTIVATIONS = [
    nn.ReLU, lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.3), nn.Tanh, nn.GELU, nn.SiLU, nn.Identity,
    lambda: Function(F.relu), lambda: Function(torch.relu), lambda: Function(lambda x: x.relu()), nn.Hardtanh,
]  # fmt: skip


@st.composite
def convolutions(draw, before: int, after: int) -> nn.Module:  # type: ignore[no-untyped-def]
    groups = draw(st.sampled_from([g for g in (1, 2, before) if before % g == 0 and after % g == 0]))
    kernel = draw(st.sampled_from([1, 3]))
    normed = draw(st.sampled_from(["none", "batch", "instance", "group", "frozen batch", "plain batch"]))
    conv = nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=normed == "none")
    norm: nn.Module = nn.Identity()
    if normed == "batch":
        norm = nn.BatchNorm2d(after)
    if normed == "instance":
        norm = nn.InstanceNorm2d(after, affine=draw(st.booleans()))
    if normed == "group":
        norm = nn.GroupNorm(2 if after % 2 == 0 else 1, after)
    if normed == "frozen batch":
        norm = nn.BatchNorm2d(after).eval()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    if normed == "plain batch":
        norm = nn.BatchNorm2d(after, affine=False, track_running_stats=draw(st.booleans()))
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
                stack.append(Residual(draw(convolutions(channels, channels)), form))
            elif kind == "beside" and channels < 12:
                stack.append(Beside(draw(convolutions(channels, 4))))
                channels += 4
            elif kind == "halves":
                stack.append(Halves(draw(convolutions(channels // 2, channels // 2)), form))
            elif kind == "shuffle":
                stack.append(Shuffled(2))
            elif kind == "pad" and channels < 12:
                stack.append(Padded(form, 2 - form))
                channels += 2
            elif kind == "pool":
                pools = [nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Dropout(0.0)]
                stack.append(pools[form])
            elif kind == "gate":
                stack.append(Gated(channels))
        if draw(st.booleans()):
            end = [
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(4 * channels, 6),
                nn.LayerNorm(6),
                nn.ReLU(),
            ]
            tail = [*end, nn.Linear(6, 4, bias=draw(st.booleans()))]
        else:
            tail = [Function(lambda x: x.mean((2, 3))), nn.Linear(channels, 4)]
        return nn.Sequential(*stack, *tail).double(), (3, 5, 5)
