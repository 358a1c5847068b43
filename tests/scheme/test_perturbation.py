"""A session's noise is new in every round or kept, never leaves the server's memory, and is not shared by a fork."""

import copy
import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, perturb, worst
from tests.sessions import Session
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import Veil, client_view, errors
from fedveil.attacks.veil import base_model
from fedveil.defences import Samples
from fedveil.models import mlp

FLOAT64 = 1e-9  # the project's promise
ROUNDS = 6
LOSSES = {
    "squared_error": lambda y, t: 0.5 * (y - F.one_hot(t, 10)).pow(2).sum(1).mean(),
    "cross_entropy": F.cross_entropy,
}


@pytest.fixture
def model():
    return built(lambda: nn.Sequential(mlp(6, 10, hidden=12)))


def keeping(model, loss="squared_error", keep_noise=True, **settings):
    return Session(Veil(keep_noise=keep_noise, **settings), model, torch.zeros(2, 6, dtype=torch.float64), loss)


def small_session(**settings):
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    return net, Veil(**settings).start(fedveil.analyse(net, torch.zeros(1, 2)))


# Noise that is kept over rounds


@pytest.mark.parametrize("head", ["linear", "exposed"])
@pytest.mark.parametrize("groups", [1, 10])
@pytest.mark.parametrize(("loss", "decoys"), [("squared_error", None), ("cross_entropy", 7)])
def test_with_kept_noise_gradients_are_exact_in_every_round_while_the_model_moves(model, loss, decoys, groups, head):
    inputs, labels = batch((6,))[0], torch.arange(6)
    groups = groups if head == "linear" else 1
    veil = keeping(model, loss, groups=groups, decoys=decoys, additive=100.0, head=head)
    for _ in range(ROUNDS):
        update = veil.step(veil.broadcast(), Samples(inputs, F.one_hot(labels, 10).double()))
        found = veil.recover([update]).gradients
        veil.round.release()
        true = torch.autograd.grad(LOSSES[loss](model(inputs), labels), list(model.parameters()))
        assert worst(found, dict(zip(found, true, strict=True))) < FLOAT64
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), true, strict=True):
                parameter -= 0.5 * gradient


@pytest.mark.parametrize("groups", [1, 10])
def test_everything_is_kept_but_the_offset_and_the_anchor(model, groups):
    veil, seen, secrets = keeping(model, groups=groups), [], []
    for _ in range(2):
        seen.append(veil.broadcast(model))
        secrets.append((veil.server.session._reserve.kept_noise[0], veil.round.perturbation.recovery.coefficients))
        veil.round.release()
        with torch.no_grad():
            [parameter.mul_(1.01) for parameter in model.parameters()]
    (first, before), (second, after) = secrets
    assert all((getattr(first, name) == getattr(second, name)).all() for name in ("scale", "members", "shifts"))
    assert all(a != b for a, b in zip(before[1 : groups + 1], after[1 : groups + 1], strict=True))  # d of the anchor
    one, two = (sent.head for sent in seen)
    assert seen[0].round != seen[1].round
    assert torch.equal(one.direction, two.direction)
    assert torch.equal(one.partition, two.partition)
    assert (one.offset != two.offset).all()
    torch.testing.assert_close(seen[1].parameters["0.0.weight"], 1.01 * seen[0].parameters["0.0.weight"])


def test_a_new_session_and_a_restored_state_draw_new_noise(model):
    veil = keeping(model)
    first = veil.broadcast(model).head.direction
    assert torch.equal(veil.broadcast(model).head.direction, first)
    assert veil.server.state() == {"draws": 1}
    for other in (veil, keeping(model)):
        other.server.restore({"draws": 1})
        assert not torch.equal(other.broadcast(model).head.direction, first)
        assert other.server.state() == {"draws": 2}
    assert keeping(model).server.state() == {"draws": 0}


def test_a_new_gamma_changes_nothing_that_an_adaptive_client_sees(model):
    """The limit that docs/defences/veil.md states: without the public offset, broadcasts of one model are equal."""
    veil, inputs = keeping(model, groups=10, additive=100.0), batch((6,))[0]
    sent = [veil.broadcast(model) for _ in range(2)]
    views, bases = ([make(model, one)(inputs) for one in sent] for make in (client_view, base_model))
    assert (views[0] - views[1]).abs().max() > 1
    torch.testing.assert_close(bases[0], bases[1])


@pytest.mark.parametrize("keep", [True, False])
def test_with_kept_noise_two_candidate_sets_give_the_true_offset_away(model, keep):
    """The true offset moves with the model, decoys are new: the nearest pair of two rounds is the true one."""
    hits, veil = 0, keeping(model, "cross_entropy", keep, decoys=3)
    for _ in range(40):
        veil.server.restore({})
        rounds = [
            (veil.broadcast(model).head.candidates, veil.round.perturbation.recovery.coefficients.index(1.0))
            for _ in range(2)
        ]
        (first, true), (second, _) = rounds
        hits += int((first - second.T).abs().min(1).values.argmin()) == true
    assert hits == 40 if keep else hits < 25  # a guess is right in 10 +- 3


# Noise that is drawn ahead


def test_noise_drawn_ahead_is_dealt_once_also_to_threads():
    _, session = small_session()
    with ThreadPoolExecutor(8) as threads:
        dealt = threads.map(lambda _: session._draw(session._reserve)[0].scale.tobytes(), range(500))
        assert len(set(dealt)) == 500


@pytest.mark.parametrize("keep_noise", [True, False])
def test_a_forked_process_has_no_noise_of_its_parent(keep_noise):
    net, session = small_session(keep_noise=keep_noise, decoys=1)
    session.perturb(net)
    assert session._reserve.unused
    assert session._reserve.fits
    assert (session._reserve.kept_noise is not None) == keep_noise
    if not (child := os.fork()):
        own = session._reserve
        os._exit(len(own.unused) + len(own.fits) + (own.kept_noise is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert session._reserve.unused  # the parent's own is as it was


@pytest.mark.parametrize("child_goes_on", [True, False])
def test_a_broadcast_does_not_change_with_work_in_the_other_process(child_goes_on):
    model = built(lambda: mlp(300, 10, hidden=300))
    session = Veil().start(fedveil.analyse(model, torch.zeros(2, 300)))
    held = session.perturb(model)
    before = {name: tensor.clone() for name, tensor in held.broadcast.parameters.items()}

    def go_on():
        held.release(reuse=True)
        for _ in range(4):
            session.perturb(model).release(reuse=True)

    def is_same():
        return all(torch.equal(tensor, before[name]) for name, tensor in held.broadcast.parameters.items())

    reader, writer = os.pipe()
    if not (child := os.fork()):
        torch.set_num_threads(1)  # the parent's threads are not here
        if child_goes_on:
            for tensor in held.broadcast.parameters.values():
                tensor.zero_()
            go_on()
            os._exit(0)
        os.read(reader, 1)
        os._exit(0 if is_same() else 3)
    if not child_goes_on:
        go_on()
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_same() or not child_goes_on
    os.close(reader)
    os.close(writer)


# Secrets


def test_secrets_show_nothing_also_after_release(model, caplog):
    veil = keeping(model, "cross_entropy", decoys=2)
    veil.broadcast()
    session, perturbation = veil.server.session, veil.round.perturbation
    units, head = session._reserve.kept_noise
    held = (session, perturbation, perturbation.recovery, perturbation.recovery.transform, units, head, veil.server)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").warning("%s %r %s %s", held, held, vars(veil), vars(veil.server))
    veil.round.release()
    shown = f"{held} {vars(session)} {vars(perturbation)} {vars(session._reserve)} {veil.server.state()} {caplog.text}"
    assert "<VeilSession, redacted>" in shown
    assert "coefficients" not in shown
    assert not any(f"{number:.6g}" in shown for number in units.scale if abs(number) != 1)


@pytest.mark.parametrize(
    "leak", [pickle.dumps, copy.copy, copy.deepcopy, lambda secret: torch.save(secret, "/dev/null")]
)
def test_secrets_are_neither_pickled_nor_copied(model, leak):
    session = keeping(model).server.session
    for secret in (session, session.perturb(model)):
        with pytest.raises(TypeError, match="cannot be pickled or copied: it never leaves the server's memory"):
            leak(secret)
    with pytest.raises(TypeError):
        pickle.dumps(keeping(model).server)


# What is refused, and what is public


def test_more_groups_than_outputs_are_refused(model):
    with pytest.raises(errors.BadArgument, match=r"Veil: groups must be at most 10, .* outputs, got 11"):
        keeping(model, groups=11)


def test_another_model_or_mode_than_the_one_analysed_is_refused(model):
    plan = fedveil.analyse(model, torch.zeros(1, 6).double())
    with pytest.raises(
        errors.ModelMismatch, match=r"0.0.weight: the plan expects shape \(12, 6\).*the model has shape \(13, 6\)"
    ):
        perturb(built(lambda: nn.Sequential(mlp(6, 10, hidden=13))), plan)
    model[0][1].eval()
    with pytest.raises(errors.ModelMismatch, match=r"0.1: its mode \(train or eval\) has changed since the analysis"):
        perturb(model, plan)


def test_the_size_of_the_noise_is_only_in_the_public_offset(model):
    bases, offsets = [], []
    for additive in (1.0, 1e6):
        veil = keeping(model, additive=additive, entropy=fedveil.Entropy.for_tests(3))
        bases.append(veil.broadcast().parameters["0.6.weight"])
        offsets.append(veil.round.broadcast.head.offset.numpy())
    assert torch.equal(*bases)
    np.testing.assert_allclose(offsets[1] / 1e6, offsets[0], rtol=1e-12)
