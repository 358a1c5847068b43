"""The generator fits its images, and its training can be interrupted."""

import pytest
import torch
from tests.attacks.victims import chance

from fedveil.attacks.generator import CODE, make_critic, make_generator, penalty, train_gan, widths
from fedveil.errors import BadArgument


def test_interrupted_training_resumes_bit_for_bit(tmp_path):
    images = torch.rand(100, 3, 8, 8, generator=chance())
    whole, curve = train_gan(images, 3, width=4)
    train_gan(images, 2, width=4, path=tmp_path / "gan.pt")
    resumed, joined = train_gan(images, 3, width=4, path=tmp_path / "gan.pt")
    kept, _ = train_gan(images, 3, width=4, path=tmp_path / "gan.pt")
    assert curve == joined
    assert len(curve) == 3
    for name, value in whole.generator.state_dict().items():
        assert torch.equal(value, resumed.generator.state_dict()[name])
        assert torch.equal(value, kept.generator.state_dict()[name])
    other, _ = train_gan(images, 1, width=4, path=tmp_path / "gan.pt", asked="other images")
    assert not torch.equal(other.generator[0].weight, whole.generator[0].weight)


def test_the_penalty_is_zero_where_the_slope_is_one():
    slope = torch.randn(3 * 8 * 8, dtype=torch.float64, generator=chance())
    images = torch.rand(5, 3, 8, 8, dtype=torch.float64)
    share = torch.rand(5, dtype=torch.float64)
    for length in (1.0, 3.0):
        found = penalty(lambda x, a=length: x.flatten(1) @ (a * slope / slope.norm()), images, images.flip(0), share)
        assert abs(float(found) - (length - 1) ** 2) < 1e-12


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (16, 3), (32, 3), (64, 3)])
def test_networks_fit_their_images(size, channels):
    generator, critic = make_generator(channels, size, 4), make_critic(channels, size, 4)
    images = generator(torch.randn(2, CODE))
    assert images.shape == (2, channels, size, size)
    assert critic(images).shape == (2,)


def test_sizes_that_doubling_does_not_reach_are_refused():
    assert widths(32, 16) == [64, 32, 16]
    for size in (4, 28, 48):
        with pytest.raises(BadArgument, match=f"{size} pixels per side"):
            widths(size, 16)
    with pytest.raises(BadArgument, match="at least 2 images"):
        train_gan(torch.zeros(1, 1, 8, 8), 1)
