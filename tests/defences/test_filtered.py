"""Filters see copies, cannot pass on what is not finite, and draw noise that no seed of NumPy's predicts."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from tests.defences.runs import federation, records

from fedveil.defences import filtered
from fedveil.defences.filtered import Filtered, FilteredClient, fresh_numpy_noise, quiet_logger, to_arrays
from fedveil.defences.plain import PlainUpdate
from fedveil.errors import BadArgument, NonFiniteUpdate
from fedveil.models import mlp, resnet
from fedveil.scheme.losses import find_loss


class Halved(Filtered):
    """Halves updates in place."""

    name = "halved"

    def create_filter(self):
        def apply(arrays):
            for own in arrays.values():
                own *= 0.5
            return arrays

        return apply


class Covered(Halved):
    """Claims to protect all that is sent."""

    refuses_buffers = True


def test_an_update_of_any_kind_is_filtered_and_the_client_s_own_stays_as_it_is():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Difference(PlainUpdate):
        steps: int = 0

    client = FilteredClient(Halved().create_filter(), mlp(3, 2), find_loss("squared_error"))
    scalar, row = torch.tensor(2.0), torch.tensor([[4.0, 6.0]], dtype=torch.float64)
    buffers = {"mean": torch.ones(2)}
    own = Difference({"scalar": scalar, "row": row}, buffers, steps=5)
    sent = client.upload(own)
    assert type(sent) is Difference
    assert (sent.steps, sent.buffers) == (5, buffers)
    assert torch.equal(sent.gradients["scalar"], torch.tensor(1.0))
    assert torch.equal(sent.gradients["row"], torch.tensor([[2.0, 3.0]], dtype=torch.float64))
    assert (float(scalar), row.tolist()) == (2.0, [[4.0, 6.0]])
    assert to_arrays({"scalar": scalar})["scalar"].shape == (1,)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_an_update_that_is_not_finite_never_reaches_a_filter(value):
    def never(arrays):
        raise AssertionError

    client = FilteredClient(never, mlp(3, 2), find_loss("squared_error"))
    with pytest.raises(NonFiniteUpdate, match="client 3"):
        client.upload(PlainUpdate({"w": torch.tensor([1.0, value])}, {}), 3)


def test_training_is_that_of_plain_with_half_the_rate():
    whole, half = (federation("mlp", one, fuse=False) for one in ("plain", Halved()))
    first, second = whole.step().gradients, half.step().gradients
    assert all(torch.equal(second[name], own / 2) for name, own in first.items())


def test_a_claim_that_does_not_cover_buffers_refuses_them():
    data = records((3, 8, 8))
    net = lambda: resnet(8, 3, 4, width=4), (3, 8, 8)
    assert federation(net, Halved(), data).step()
    with pytest.raises(BadArgument, match=r"(?s)halved: buffer .* depends on the clients' data.*GroupNorm"):
        federation(net, Covered(), data)


def test_a_seed_of_numpy_s_neither_predicts_the_noise_nor_notices_it(monkeypatch):
    drawn = []
    for _ in range(2):
        np.random.seed(0)
        with fresh_numpy_noise():
            drawn.append(np.random.normal(size=4))
    after = np.random.normal(size=4)
    np.random.seed(0)
    assert np.array_equal(after, np.random.normal(size=4))
    assert not np.array_equal(*drawn)
    assert not any(np.array_equal(after, own) for own in drawn)
    with pytest.raises(ZeroDivisionError), fresh_numpy_noise():
        raise ZeroDivisionError
    assert filtered._NUMPY_LOCK.acquire(blocking=False)  # an error releases it
    filtered._NUMPY_LOCK.release()


def test_a_noisy_logger_is_quiet_only_during_a_call(caplog):
    logger = logging.getLogger("chatty")
    logger.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, "chatty"):
        with quiet_logger("chatty"):
            logger.info("clipped")
        logger.info("after")
    assert caplog.messages == ["after"]
