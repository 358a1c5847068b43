"""Images of a class from a model alone: where the model knows the class they show it, where it does not they do not."""

import functools

import pytest
import torch
from tests.attacks.victims import chance
from torch import nn
from torch.nn import functional as F

from fedveil.attacks import inversion
from fedveil.attacks.inversion import Gan, make_critic, make_generator, search, train_gan
from fedveil.errors import BadArgument
from fedveil.models import cnn
from fedveil.studies.inversion.evaluator import wilson

HUES = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.1, 0.1, 0.9], [0.9, 0.9, 0.1]])
WANTED = torch.arange(4).repeat(25)


def squares(colours, seed):
    """Images of 8 x 8: a square of 4 x 4 of one colour somewhere on grey noise."""
    random = chance(seed)
    images = 0.1 * torch.rand(len(colours), 3, 8, 8, generator=random)
    corners = torch.randint(0, 5, (len(colours), 2), generator=random).tolist()
    for image, colour, (down, right) in zip(images, colours, corners, strict=True):
        image[:, down : down + 4, right : right + 4] = colour[:, None, None]
    return images


def find_hue(images):
    """Which hue the brightest pixels have: the rule by which the private classes were made."""
    bright = images.flatten(2).topk(8, dim=2).values.mean(2)
    return torch.cdist(F.normalize(bright), F.normalize(HUES)).argmin(1)


@functools.cache
def public_gan():
    """A generator that saw squares of all colours, of no class."""
    colours = torch.rand(1500, 3, generator=chance())
    return train_gan(squares(colours, 1), 40, width=16, lr=2e-3)[0]


@functools.cache
def leaky_model():
    """A classifier of four hues, trained with squared error as a federation is."""
    targets = torch.arange(4).repeat(100)
    images = squares(HUES[targets], 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cnn(3, 4, width=8, size=8)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(10):
            for rows in torch.randperm(len(images)).split(32):
                optimizer.zero_grad()
                (model(images[rows]) - F.one_hot(targets[rows], 4)).square().sum(1).mean().backward()
                optimizer.step()
    assert (model(images).argmax(1) == targets).double().mean() > 0.95
    return model


def recover(model, how, steps):
    """The images found, and the interval of the fraction that show their class."""
    if how == "codes":
        found = search(model, public_gan(), WANTED, steps=steps, restarts=2).images
    else:
        found = inversion.search_pixels(model, (3, 8, 8), WANTED, steps=steps).images
    return found, wilson(find_hue(found) == WANTED)


@pytest.mark.parametrize(("how", "least"), [("codes", 0.8), ("pixels", 0.5)])  # pixels: 0.63 to 0.83, by rounding
def test_classes_are_recovered_from_a_model_that_knows_them_and_from_no_other(how, least):
    assert torch.equal(find_hue(squares(HUES[WANTED], 5)), WANTED)
    found, interval = recover(leaky_model(), how, 100)
    assert interval[1] > least
    assert ((found >= 0) & (found <= 1)).all()
    _, (_, low, high, *_) = recover(lambda images: 0 * images.flatten(1)[:, :4], how, 50)
    assert low <= 1 / 4 <= high


def test_a_search_repeats_each_code_is_independent_and_the_largest_output_is_kept_even_below_zero():
    def negative(images):
        return leaky_model()(images) - 100

    gan = Gan(*(make(3, 8, 4) for make in (make_generator, make_critic)))
    wanted = torch.arange(4).repeat(4)  # 8 codes of 100 numbers are full blocks of torch's generator
    cases = (wanted, 3), (wanted, 3), (wanted[:8], 3), (wanted, 4)
    whole, again, part, other = (
        search(leaky_model(), gan, some, steps=5, restarts=2, seed=seed).images for some, seed in cases
    )
    assert torch.equal(whole, again)
    assert torch.allclose(whole[:8], part, atol=1e-4)
    assert not torch.allclose(whole, other, atol=1e-2)
    one, three = (search(negative, gan, wanted[:8], steps=2, restarts=count) for count in (1, 3))
    assert torch.isfinite(one.scores).all()
    assert (three.scores >= one.scores).all()
    assert (three.scores > one.scores).any()
    assert torch.equal(negative(three.images).gather(1, wanted[:8, None])[:, 0], three.scores)


def test_codes_move_to_a_smaller_objective_and_stay_in_their_box():
    class Level(nn.Module):
        def forward(self, x):
            return x.mean((1, 2, 3))

    wanted, codes = torch.tensor([0, 1]), nn.Unflatten(1, (1, 10, 10))  # a generator whose image is its code
    found = search(lambda x: x[:, 0, 0, :2], Gan(codes, Level()), wanted, steps=200, restarts=1).images
    assert found.abs().max() <= 1
    assert found[0, 0, 0, 0] == found[1, 0, 0, 1] == 1  # the wanted class's output as large as the box allows
    assert found[0, 0, 0, 1] == found[1, 0, 0, 0] == -1


def test_interrupted_training_resumes_bit_for_bit(tmp_path):
    images, path = torch.rand(100, 3, 8, 8, generator=chance()), tmp_path / "gan.pt"
    whole, curve = train_gan(images, 3, width=4)
    train_gan(images, 2, width=4, path=path)
    for _ in range(2):  # resumed, then read as it is
        found, joined = train_gan(images, 3, width=4, path=path)
        assert curve == joined
        for name, value in whole.generator.state_dict().items():
            assert torch.equal(value, found.generator.state_dict()[name])
    other, _ = train_gan(images, 1, width=4, path=path, data_key="other images")
    assert not torch.equal(other.generator[0].weight, whole.generator[0].weight)


def test_the_penalty_is_zero_where_the_slope_is_one_and_a_model_of_inputs_answers_for_pixels():
    slope = torch.randn(3 * 8 * 8, dtype=torch.float64, generator=chance())
    images, share = torch.rand(5, 3, 8, 8, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    for length in (1.0, 3.0):
        critic = lambda x, a=length: x.flatten(1) @ (a * slope / slope.norm())  # noqa: E731
        assert abs(float(inversion.penalty(critic, images, images.flip(0), share)) - (length - 1) ** 2) < 1e-12
    model, pixels = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4)).train(), torch.rand(3, 1, 2, 2)
    answer = inversion.accept_pixels(model, lambda x: 2 * x)(pixels)
    assert model.training
    assert torch.allclose(answer, 2 * pixels.flatten(1), atol=1e-4)  # statistics are still 0 and 1


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (16, 3), (64, 3)])
def test_networks_fit_their_images(size, channels):
    images = make_generator(channels, size, 4)(torch.randn(2, inversion.CODE_SIZE))
    assert images.shape == (2, channels, size, size)
    assert make_critic(channels, size, 4)(images).shape == (2,)


@pytest.mark.parametrize(
    ("count", "size", "why"),
    [*((2, size, f"a side length of {size} pixels") for size in (4, 28, 48)), (1, 8, "at least 2 images")],
)
def test_sizes_that_doubling_does_not_reach_and_single_images_are_refused(count, size, why):
    with pytest.raises(BadArgument, match=why):
        train_gan(torch.zeros(count, 1, size, size), 1)
