"""Forward may return any structure with one tensor of predictions, and take any mapping; the choice is the user's."""

import copy
from collections import namedtuple

import pytest
import torch
from tests.users import CLASSES, Encoder, Encoding, ModelOutput, batch
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import Broadcast
from fedveil.errors import BadArgument
from fedveil.graph.inputs import as_dicts, call
from fedveil.graph.outputs import choose_output
from fedveil.wire import from_bytes, to_bytes

Pair = namedtuple("Pair", ["prediction_logits", "relationship_logits"])
FORMS = {  # what forward returns, and the choice
    "a tensor": (lambda y, h: y, None),
    "a 1-tuple": (lambda y, h: (y,), None),
    "(logits, None)": (lambda y, h: (y, None), None),
    "a list": (lambda y, h: [y], None),
    "a dict": (lambda y, h: {"logits": y, "hidden": h}, None),
    "a ModelOutput": (lambda y, h: ModelOutput(y, (h,), h), None),
    "a mapping": (lambda y, h: Encoding(logits=y, hidden_states=(h,)), None),
    "a loss beside it": (lambda y, h: {"loss": y.sum(), "predictions": y}, None),
    "by name": (lambda y, h: {"last_hidden_state": h, "scores": y}, "scores"),
    "a named tuple": (lambda y, h: Pair(y, h), "prediction_logits"),
    "a function": (
        lambda y, h: {"start": y[..., 0], "rest": y[..., 1:]},
        lambda o: torch.cat([o["start"][:, None], o["rest"]], 1),
    ),
}


def recovered(net, inputs, targets, loss="cross_entropy", **options):
    plan = fedveil.analyse(net, inputs, **options)
    perturbation = fedveil.Veil().perturb(net, plan, loss)
    update = fedveil.client_step(copy.deepcopy(net), perturbation.broadcast, inputs, targets)
    return perturbation.recover([update]).gradients


def worst_error(net, found, loss):
    true = torch.autograd.grad(loss, list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    assert set(found) == set(names)
    return max(float((found[name] - own).abs().max()) for name, own in zip(names, true, strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_predictions_in_any_form(name):
    wrap, output = FORMS[name]
    net, inputs, targets = Encoder(wrap).double(), batch(), torch.arange(5) % CLASSES
    found = recovered(net, inputs, targets, output=output)
    logits = Encoder.forward(_plain(net), **inputs)
    assert worst_error(net, found, F.cross_entropy(logits, targets)) < 1e-9
    assert "forward" not in vars(net)


def _plain(net):
    """The same tensors, with forward returning the logits alone."""
    twin = copy.copy(net)
    twin.wrap = lambda logits, features: logits
    return twin


def test_a_wrong_choice_changes_the_gradients():
    net, inputs, targets = Encoder(lambda y, h: {"a": y, "b": h[..., :CLASSES]}).double(), batch(), torch.arange(5) % 3
    found = recovered(net, inputs, targets, head="exposed", output="b")
    assert float(found["embed.weight"].abs().max()) > 0
    assert found.get("classifier.weight", torch.zeros(1)).abs().max() == 0


@pytest.mark.parametrize(
    ("wrap", "output", "text"),
    [
        (
            lambda y, h: {"last_hidden_state": h, "pooler_output": h},
            None,
            "several floating-point tensors: last_hidden_state",
        ),
        (lambda y, h: (y, h), None, "several floating-point tensors: 0, 1"),
        (lambda y, h: {"loss": y.sum()}, None, "no floating-point tensor"),
        (lambda y, h: {"logits": y}, "start_logits", "without 'start_logits', but with logits"),
        (lambda y, h: {"logits": y}, lambda found: found, "a dict, not one tensor"),
        (lambda y, h: y, 3, "expected a name or a function"),
        (lambda y, h: y, "", "expected a name or a function"),
    ],
)
def test_an_ambiguous_or_unknown_output_is_refused(wrap, output, text):
    with pytest.raises(BadArgument) as caught:
        fedveil.analyse(Encoder(wrap), batch(), output=output)
    assert text in str(caught.value)


def test_a_view_shares_everything_but_its_forward():
    net = Encoder(lambda y, h: {"a": y, "b": h})
    view = choose_output(net, "a")
    assert type(view) is type(net)
    assert [own is other for own, other in zip(net.parameters(), view.parameters(), strict=True)] == [True] * 5
    assert torch.equal(call(view, batch()), net(**batch())["a"])
    twin = copy.deepcopy(view)
    with torch.no_grad():
        twin.classifier.weight.zero_()
        twin.classifier.bias.fill_(7.0)
    assert bool((call(twin, batch()) == 7).all())  # a copy runs its own tensors
    assert not bool((call(view, batch()) == 7).any())
    assert choose_output(view, "a") is view
    with pytest.raises(BadArgument, match="already been chosen"):
        choose_output(view, "b")


def test_a_chain_of_layers_with_an_output_function_runs_it():
    net, inputs, targets = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double(), torch.randn(6, 4), None
    inputs, targets = inputs.double(), torch.arange(6) % 2
    found = recovered(net, inputs, targets, output=lambda y: y[:, :2])
    assert worst_error(net, found, F.cross_entropy(net(inputs)[:, :2], targets)) < 1e-9


def test_a_message_has_the_name_of_the_output_and_a_function_is_passed():
    net, inputs = Encoder(lambda y, h: {"a": y, "b": h}), batch()
    for output in ("a", second):
        plan = fedveil.analyse(net, inputs, output=output)
        values, tensors = fedveil.Veil().perturb(net, plan, "cross_entropy").broadcast.pack()
        sent = from_bytes(to_bytes("x", values, tensors), "x")
        own = None if output == "a" else output
        assert Broadcast.unpack(*sent, output=own).output is own or output == "a"
        if own:
            with pytest.raises(BadArgument, match="is a function, which is not sent"):
                Broadcast.unpack(*sent)
        with pytest.raises(BadArgument, match="but the client's is"):
            Broadcast.unpack(*sent, output="b")


def second(found):
    return found["b"]


def test_mappings_of_any_kind_are_keyword_arguments_wherever_they_are():
    ids = torch.ones(2, 3)
    assert as_dicts(ids) is ids
    nested = as_dicts((Encoding(a=ids, b=Encoding(c=1)), [Encoding(d=None)]))
    assert nested == ({"a": ids, "b": {"c": 1}}, [{"d": None}])
    net = Encoder()
    assert torch.equal(call(net, batch()), call(net, dict(batch())))


def test_what_the_predictions_do_not_depend_on_limits_no_noise():
    """A batch may contain the labels, from which the model computes a loss; a branch that is not chosen is not sent."""

    def wrap(logits, features):
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        return {"loss": loss, "logits": logits, "pooled": features.std(0)}

    plan, plain = (fedveil.analyse(Encoder(own), batch()) for own in (wrap, lambda y, h: y))
    assert (plan.shares, plan.pinned) == (plain.shares, plain.pinned)
    other = fedveil.analyse(Encoder(wrap), batch(), head="exposed", output="pooled")
    assert other.layout.unused == ("classifier.weight", "classifier.bias")


def test_a_norm_that_the_predictions_do_not_depend_on_still_updates_its_statistics():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x):
            return {"logits": self.head(x), "aside": self.norm(x)}

    net, inputs, targets = Aside().double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    plan = fedveil.analyse(net, inputs)
    perturbation = fedveil.Veil().perturb(net, plan, "cross_entropy")
    result = perturbation.recover([fedveil.client_step(copy.deepcopy(net), perturbation.broadcast, inputs, targets)])
    net(inputs)
    for name, own in net.named_buffers():
        assert torch.allclose(result.buffers[name].double(), own.double(), atol=1e-12)
