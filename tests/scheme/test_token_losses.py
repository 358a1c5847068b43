"""Losses over labelled positions are torch's, and the veil's gradients are those of autograd."""

import copy

import pytest
import torch
from tests.users import CLASSES, Encoder, Sentences, batch, pad_tokens
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fedveil
from fedveil import Federation
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics
from fedveil.scheme.broadcast import resolve_loss
from fedveil.scheme.losses import IGNORED, find_loss
from fedveil.scheme.token_losses import TOKEN_LOSSES


def labels(inputs):
    """One label per token; padding and the first token of each row have none."""
    found = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"] % CLASSES, IGNORED)
    found[:, 0] = IGNORED
    return found


def token(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, CLASSES), targets.reshape(-1))


def causal(outputs, targets):
    return token(outputs[:, :-1], targets[:, 1:])


TRUE = {"token_cross_entropy": token, "causal_cross_entropy": causal}


@pytest.mark.parametrize("name", TRUE)
@pytest.mark.parametrize("options", [{}, {"head": "exposed"}])
def test_gradients_are_those_of_the_mean_over_labelled_tokens(name, options):
    net, inputs = Encoder(lambda y, h: {"logits": y}, tokens=True).double(), batch()
    plan = fedveil.analyse(net, inputs, **options)
    perturbation = fedveil.Veil().perturb(net, plan, name)
    longer = batch(length=9, seed=1)  # a batch need not have the length of the example
    for own in (inputs, longer):
        targets = labels(own)
        found = perturbation.recover([fedveil.client_step(net, perturbation.broadcast, own, targets)]).gradients
        true = torch.autograd.grad(TRUE[name](net(**own)["logits"], targets), list(net.parameters()))
        for (key, _), gradient in zip(net.named_parameters(), true, strict=True):
            assert (found[key] - gradient).abs().max() < 1e-9


def test_the_divisor_is_the_number_of_labels_not_of_samples():
    net, inputs = Encoder(tokens=True).double(), batch()
    targets = labels(inputs)
    mean = F.cross_entropy(net(**inputs).movedim(-1, 1), targets, reduction="sum") / len(targets)
    assert (mean - token(net(**inputs), targets)).abs() > 1e-3
    values = find_loss("token_cross_entropy").values(net(**inputs), targets)
    assert values.shape == (5,)
    assert (values - token(net(**inputs), targets)).abs().max() < 1e-12


def test_without_positions_ignored_records_do_not_count():
    outputs, targets = torch.randn(4, CLASSES), torch.tensor([0, IGNORED, 2, IGNORED])
    assert torch.allclose(
        find_loss("token_cross_entropy").values(outputs, targets)[0], F.cross_entropy(outputs, targets)
    )


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "text"),
    [
        ("token_cross_entropy", (2, 3, 4), torch.full((2, 3), IGNORED), "every label in a batch of 2 records"),
        ("token_cross_entropy", (2, 3, 4), torch.zeros(2, 2, dtype=torch.long), "class indices of shape \\(2, 3\\)"),
        ("token_cross_entropy", (2, 3, 4), torch.zeros(2, 3), "got torch.float32"),
        ("token_cross_entropy", (2, 3, 4), torch.full((2, 3), 4), "outputs 0 to 3"),
        ("causal_cross_entropy", (2, 4), torch.zeros(2, dtype=torch.long), "one label per position"),
    ],
)
def test_targets_that_do_not_fit_are_refused(name, outputs, targets, text):
    with pytest.raises(BadArgument, match=text):
        find_loss(name).values(torch.zeros(outputs), targets)


def test_a_part_of_a_batch_is_refused_because_its_divisor_is_unknown():
    loss = find_loss("causal_cross_entropy")
    assert loss.couples
    with pytest.raises(BadArgument, match="only some of the records"):
        loss.weigh_part(torch.full((4,), 1 / 8))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_the_loss_is_sent_by_name_and_settings(name):
    own = TOKEN_LOSSES[name](label_smoothing=0.2)
    assert resolve_loss("x", own.name, own.settings(), None) == own
    with pytest.raises(BadArgument, match="no setting"):
        resolve_loss("x", own.name, {"weight": None}, None)
    with pytest.raises(BadArgument, match="label_smoothing"):
        TOKEN_LOSSES[name](label_smoothing=1.0)


def test_metrics_count_only_labelled_positions():
    outputs = F.one_hot(torch.tensor([[0, 1, 2, 0]]), CLASSES).double()
    targets = torch.tensor([[IGNORED, 1, 1, IGNORED]])
    assert metrics(outputs, targets, find_loss("token_cross_entropy"))["accuracy"] == 0.5
    found = metrics(outputs, targets, find_loss("causal_cross_entropy"))  # outputs 0 and 1 are compared with labels 1
    assert found["accuracy"] == 0.5
    assert abs(found["loss"] - float(causal(outputs, targets))) < 1e-12


@pytest.mark.parametrize("name", TRUE)
def test_a_veil_trains_like_plain_when_padding_differs_from_batch_to_batch(name):
    clients = [DataLoader(Sentences(9 + k, k), batch_size=4, collate_fn=pad_tokens) for k in range(2)]
    net, found = Encoder(lambda y, h: {"logits": y}, tokens=True).double(), []
    for defence in ("plain", "veil"):
        run = Federation(copy.deepcopy(net), clients, defence, torch.optim.Adam, loss=name)
        run.fit(rounds=3, test=clients[0])
        found.append((torch.nn.utils.parameters_to_vector(run.model.parameters()), run.history.records[-1]["loss"]))
    (plain, first), (veil, other) = found
    assert (plain - veil).abs().max() < 1e-9
    assert abs(first - other) < 1e-9


def test_the_default_loss_says_what_to_use_for_ignored_labels():
    client = DataLoader(Sentences(8), batch_size=4, collate_fn=pad_tokens)
    with pytest.raises(BadArgument, match="token_cross_entropy"):
        Federation(Encoder(tokens=True), [client], "plain").fit(rounds=2)
