"""Over a network, each client protects its own records: it checks the terms, keeps a ledger, and bounds each record."""

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed._composable  # draws a random number when torch's optimizers first import it
from scipy import stats
from tests.engines import Loopback, LoopbackServer, member
from tests.federation.secured import POLICY, SERVER, adam, net, parties, parts, roster_of, server_of
from tests.seeding import seed_all
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedveil import Federation, Privacy, Veil
from fedveil.errors import TooFewAnswers
from fedveil.federation import secure_round
from fedveil.federation.client import ClientSession
from fedveil.federation.protocol import MaskedAnswer, Request, SecureTerms, read
from fedveil.privacy.accounting import composed_epsilon, filtered_epsilon
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.privacy.samplers import SCALE
from fedveil.secagg.messages import HEAD_WORDS, Upload
from fedveil.secagg.policy import PrivacyLimits
from fedveil.wire import as_bytes, read_kind

PRIVATE = Privacy(noise=2.0, rate=0.5, noise_by="clients", vanishing=1)
VEIL = Veil(multiplicative=1.0, decoys=2)


def limited(folder, count=5, **changes):
    """Parties with their own limits, each with a ledger."""
    known = parties(tuple(f"site-{k}" for k in range(count)))
    for name, party in known.items():
        own = {"dataset": "d", "records": 30, "epsilon": 50.0, "ledger": folder / f"{name}.ledger", **changes}
        party.policy = replace(POLICY, privacy=PrivacyLimits(**own))
    return known


def ledger_of(party):
    own = party.policy.privacy
    return PrivacyLedger(own.ledger, own.epsilon, own.delta)


def clear_server(defence, privacy):
    members = {f"site-{k}": member(net, own, k) for k, own in enumerate(parts())}
    options = {"loss": "squared_error", "timeout": 1.0, "pause": 0.0, "attempts": 1}
    return LoopbackServer(Loopback(members), net(), parts()[0][0][:2], defence, adam, privacy=privacy, **options)


def flat(gradients):
    return torch.cat([own.flatten() for own in gradients.values()]).double()


@pytest.mark.parametrize("defence", ["plain", VEIL], ids=["plain", "veil"])
@pytest.mark.parametrize("secure", [False, True], ids=["clear", "secure"])
def test_a_remote_sum_without_noise_is_the_clipped_sum_of_one_process(defence, secure):
    privacy = Privacy(noise=0.0, rate=1.0, clip=0.1)
    remote = (server_of(defence, privacy=privacy) if secure else clear_server(defence, privacy)).step()
    local = Federation(net(), parts(), "plain", loss="squared_error", privacy=privacy).step()
    grid = privacy.grid(len(flat(local.gradients)), 1, None)
    bound = 2 * 5 * grid.unit / 116 + 1e-12  # half a unit per client and number, twice; 116 records
    assert float((flat(remote.gradients) - flat(local.gradients)).abs().max()) < bound


def answers_none(_):
    return None


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_noise_by_clients_is_what_it_claims_however_many_vanish(absent, tmp_path):
    """Samples are empty, so the sum is noise alone; 7 clients, one may collude, two may vanish."""
    known = limited(tmp_path, 7, epsilon=900.0)
    faults = {(f"site-{k}", 1): answers_none for k in range(absent)}  # after the hello, the upload is lost
    privacy, drawn = replace(PRIVATE, rate=1e-9, vanishing=2), []
    for _ in range(8):
        own = server_of("plain", privacy=privacy, known=known, faults=faults, sizes=(20,) * 7)
        result = own.exchange()
        assert result.figures["records"] == 30 * (7 - absent)  # as declared, not as counted
        drawn.append(flat(result.gradients) * 1e-9 * result.figures["records"])
    grid = own.defence.privacy.grid(len(drawn[0]), 1, 7)
    deviation = grid.unit * SCALE * math.sqrt(7 - absent)
    scaled = torch.cat(drawn).numpy() / deviation
    assert stats.kstest(scaled, "norm").statistic < math.sqrt(math.log(2 / 1e-11) / 2 / len(scaled))
    unknown = deviation * math.sqrt((7 - absent - 1) / (7 - absent))  # to a colluding client
    assert unknown >= privacy.noise * privacy.clip


@pytest.mark.parametrize("lenient", [False, True], ids=["server", "clients"])
def test_a_sum_with_too_few_shares_of_noise_is_not_opened(lenient, tmp_path, monkeypatch):
    """By the server's own check and, if it has none, by the clients'."""
    if lenient:
        monkeypatch.setattr(secure_round.SecureRound, "_check_noise", lambda *_: None)
    known = limited(tmp_path)
    faults = {("site-4", number): answers_none for number in range(1, 20)}
    own = server_of("plain", privacy=replace(PRIVATE, vanishing=0), known=known, faults=faults, attempts=1)
    with pytest.raises(TooFewAnswers, match=r"at least 5 of 5 clients must remain|5 are needed"):
        own.step()
    assert all(ledger_of(known[f"site-{k}"]).spent() == {(2.0, 0.5): 1} for k in range(4))  # uploads had left


def uploads_of(party, monkeypatch):
    """Count the uploads of a client by the noise and rate of the ask."""
    found, upload = Counter(), party.upload

    def count(ticket, words):
        data = upload(ticket, words)
        found["uploads"] += 1
        return data

    monkeypatch.setattr(party, "upload", count)
    return found


def test_a_hostile_server_never_gets_more_than_the_ledger_allows(tmp_path, monkeypatch):
    """It starts new runs, loses members and attempts, and asks for other noise and rates, in random order."""
    monkeypatch.setattr(secure_round.SecureRound, "_check_noise", lambda *_: None)
    known, draw = limited(tmp_path, epsilon=10.0, noise=0.8, rate=0.6, varying=True), Random(0)
    victim = known["site-0"]
    uploads, refused, budget_ended = uploads_of(victim, monkeypatch), 0, False
    for _ in range(20):
        privacy = replace(
            PRIVATE,
            noise=draw.choice([0.5, 1.0, 2.0]),
            rate=draw.choice([0.5, 0.9]),
            vanishing=draw.choice([0, 1]),
        )
        faults = {
            (f"site-{k}", number): answers_none for k in range(1, 5) for number in range(6) if draw.random() < 0.1
        }
        run = server_of(draw.choice(["plain", VEIL]), privacy=privacy, known=known, faults=faults, attempts=2)
        for _ in range(draw.randint(1, 3)):
            try:
                run.step()
            except TooFewAnswers as error:
                refused += 1
                budget_ended |= "budget of epsilon 10" in str(error)
        spent = ledger_of(victim).spent()
        assert sum(spent.values()) == uploads["uploads"]
        assert all(noise >= 0.8 and rate <= 0.6 for noise, rate in spent)
        assert composed_epsilon(spent, 1e-5) <= filtered_epsilon(spent, 1e-5, 10.0) <= 10.0
    assert uploads["uploads"] > 5
    assert refused
    assert budget_ended


@pytest.mark.parametrize(
    ("privacy", "secure", "text"),
    [
        (None, True, "requires differential privacy for each record"),
        (None, False, "requires secure aggregation"),
        (Privacy(noise=2.0, rate=0.5), False, "requires secure aggregation"),
        (Privacy(noise=2.0, rate=0.5), True, "noise_by = server violates this client's policy"),
        (replace(PRIVATE, noise=0.4), True, "noise = 0.4 violates this client's policy"),
        (replace(PRIVATE, rate=0.8), True, "rate = 0.8 violates this client's policy"),
        (replace(PRIVATE, colluding=1), True, "colluding = 1 violates this client's policy"),
    ],
)
def test_limits_of_a_client_bind_every_server(privacy, secure, text, tmp_path):
    known = limited(tmp_path, rate=0.7, colluding=2)
    own = server_of("plain", privacy=privacy, known=known, attempts=1) if secure else clear_server("plain", privacy)
    if not secure:
        own.engine.transport.answers = {
            name: ClientSession(net(), data, client=0, party=known[name]).reply
            for name, data in zip(known, parts(), strict=True)
        }
        own.engine._identity = SERVER
    with pytest.raises(TooFewAnswers, match=text):
        own.step()
    assert not list(tmp_path.glob("*.ledger"))


def test_limits_bind_without_an_identity_too(tmp_path):
    policy = replace(POLICY, privacy=limited(tmp_path)["site-0"].policy.privacy)
    own = clear_server("plain", Privacy(noise=2.0, rate=0.5))
    own.engine._identity = SERVER
    own.engine.transport.answers = {"site-0": ClientSession(net(), parts()[0], client=0, policy=policy).reply}
    with pytest.raises(TooFewAnswers, match="requires secure aggregation"):
        own.step()


def transcript(data, folder, privacy=PRIVATE):
    """What clients send in a round, without the masked words, and the public part of the asks of three rounds."""
    seed_all("neighbours")
    known, sent, asks = limited(folder) if privacy.noise_by == "clients" else parties(), [], []

    def listen(reply):
        def answer(message, own):
            found = reply(message, own)
            if read_kind(message) == "request":
                ask = read(message, Request)
                opening = SecureTerms.from_values(ask.secure).opening
                asks.append((ask.privacy, ask.batch_size, opening.exponents, opening.rows, opening.checks))
            if len(asks) <= len(known):
                sent.append(hide_words(found))
            return found

        return answer

    own = server_of("plain", privacy=privacy, known=known)
    own.engine.transport.answers = {
        name: listen(ClientSession(net(), records, client=0, party=known[name]).reply)
        for name, records in zip(known, data, strict=True)
    }
    for _ in range(3):
        own.step()
    return sent, asks


def hide_words(reply):
    if read_kind(reply) == "step":
        return reply
    data = as_bytes("answer", read(reply, MaskedAnswer, 1).tensors, "upload")
    upload = Upload.from_bytes(data, 5, HEAD_WORDS + sum(own.numel() for own in net().parameters()))
    return upload.context, upload.commitments, upload.hashes, upload.sealed, len(data)


def test_neighbouring_data_give_the_same_messages_but_for_the_masked_words(tmp_path):
    """One record has a gradient a million times as large. Random draws are the same, since tests are seeded."""
    found = []
    for name, scale in (("a", 1.0), ("b", 1e6)):
        data = parts()
        data[0][0][0] *= scale
        found.append(transcript(data, tmp_path / name))
    assert found[0] == found[1]
    assert len(found[0][1]) == 15


def single():
    return net().float()


@pytest.mark.parametrize("spoil", ["class", "overflow", "magnitude"])
def test_a_record_on_which_the_computation_fails_is_left_out_alone(spoil):
    """The sum is that of the other records, and nothing is refused."""
    quiet, build, data = Privacy(noise=0.0, rate=1.0, clip=0.1), single if spoil == "overflow" else net, parts()
    if spoil == "class":
        data[0][1][3] = 99  # the model has four outputs
    else:
        data[0][0][3] = 1e300  # no float32; in float64 the loss overflows
    others = [(data[0][0][torch.arange(30) != 3], data[0][1][torch.arange(30) != 3]), *data[1:]]
    found = []
    for given in (data, others):
        known = parties()
        own = server_of("plain", privacy=quiet, known=known, build=build)
        own.engine.transport.answers = {
            name: ClientSession(build(), records, client=0, party=known[name]).reply
            for name, records in zip(known, given, strict=True)
        }
        result = own.exchange()
        found.append(flat(result.gradients) * result.figures["records"])
    unit = quiet.grid(len(found[0]), 1, None).unit
    eps = torch.finfo(torch.float32 if spoil == "overflow" else torch.float64).eps
    rounding = 5 * unit + 116 * 64 * eps * quiet.clip  # of five clients, and of 116 gradients
    assert float((found[0] - found[1]).abs().max()) <= rounding


def test_the_server_does_not_learn_where_a_damaged_ledger_is(tmp_path):
    known = limited(tmp_path)
    for name in known:
        (tmp_path / f"{name}.ledger").write_text("{}")
    with pytest.raises(TooFewAnswers, match="ledger cannot be used") as caught:
        server_of("plain", privacy=PRIVATE, known=known, attempts=1).step()
    assert str(tmp_path) not in str(caught.value)
    assert all((tmp_path / f"{name}.ledger").read_text() == "{}" for name in known)


def exact_sum(build, loss, data, example, change=None, folder=None):
    """The sum of gradients clipped to 1, from clients that use every record; with limits if there is a folder."""
    seed_all("neighbours")  # the same order of the sample, and the same noise
    known, quiet = parties(), Privacy(noise=0.0, rate=1.0, clip=1.0)
    if folder is not None:
        known, quiet = limited(folder, noise=0.1, epsilon=900.0), replace(PRIVATE, noise=0.1, rate=1.0)
    server = LoopbackServer(
        Loopback(
            {n: ClientSession(build(), own, client=0, party=known[n]).reply for n, own in zip(known, data, strict=True)}
        ),
        build(),
        example,
        "plain",
        adam,
        loss=loss,
        timeout=60.0,
        pause=0.0,
        attempts=1,
        batch_size=8,
        secure_aggregation=roster_of(known),
        identity=SERVER,
        privacy=quiet,
    )
    if change:
        change(server.model)
    result = server.exchange()
    return flat(result.gradients) * result.figures["records"]


def fragile():
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1)).double()


def make_rounding_visible(model):
    """Choose weights whose large activations cancel; the order of additions decides what is left."""
    with torch.no_grad():
        first, second, third = model[0], model[2], model[4]
        first.weight.zero_()
        first.bias.fill_(5.0)[:2] = 2.0**55 * 40
        second.weight.zero_()
        second.weight[0] = 1.0
        second.weight[0, 1] = -1.0
        second.bias.zero_()[0] = 5.0
        third.weight.zero_()
        third.weight[0, 0] = 1.0
        third.bias.fill_(-25.0)


def test_a_failing_record_does_not_change_how_others_are_computed():
    """The server chooses the loss, which fails for negative targets, and weights that make rounding visible."""
    found = []
    for target in (0.01, -0.01):
        draw = torch.Generator().manual_seed(0)
        data = [
            (torch.randn(40, 6, generator=draw).double(), torch.rand(40, 1, generator=draw).double() * 3 + 0.1)
            for _ in range(5)
        ]
        data[0][1][7] = target
        found.append(exact_sum(fragile, "poisson", data, data[0][0][:2], make_rounding_visible))
    assert float((found[0] - found[1]).norm()) <= 1.0 + 1e-3
    assert bool(found[0].any())


def test_a_record_with_nan_in_memory_is_left_out_alone(tmp_path):
    found = []
    for name, value in (("a", 0.5), ("b", float("nan"))):
        data = parts()
        data[0][0][7, 0] = value
        found.append(exact_sum(net, "squared_error", data, parts()[0][0][:2], folder=tmp_path / name))
    grid = replace(PRIVATE, noise=0.1).grid(len(found[0]), 1, 5)
    noise = grid.unit * SCALE * math.sqrt(2 * 5)  # of the difference, which exceeds this bound once in 1e10 runs
    assert float((found[0] - found[1]).norm()) <= 1.0 + noise * (
        math.sqrt(len(found[0])) + math.sqrt(2 * math.log(1e10))
    )


class Sequences(Dataset):
    """Sequences of equal length, apart from one that may be longer."""

    def __init__(self, seed, long):
        draw = torch.Generator().manual_seed(seed)
        self.inputs = [torch.rand(5, 3, generator=draw) + 1 for _ in range(40)]
        if long:
            self.inputs[7] = torch.ones(400, 3)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.inputs[index], index % 2


class MeanOfSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.lin.weight.copy_(torch.tensor([[9.0] * 3, [-9.0] * 3]))

    def forward(self, x):
        return self.lin(x.mean(1))


def pad(items):
    return nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


@pytest.mark.parametrize("collate", [pad, None], ids=["padded", "default"])
def test_a_longer_record_does_not_change_the_form_of_others(collate):
    found = []
    for long in (False, True):
        data = [DataLoader(Sequences(k, long and not k), batch_size=8, collate_fn=collate) for k in range(5)]
        found.append(exact_sum(MeanOfSequence, "cross_entropy", data, torch.rand(2, 5, 3)))
    assert float((found[0] - found[1]).norm()) <= 1.0 + 1e-3
    assert bool(found[0].any())


def test_a_server_cannot_switch_a_module_to_training():
    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double().eval()

    with pytest.raises(TooFewAnswers, match="the model is in training mode on the server"):
        exact_sum(build, "squared_error", parts(), parts()[0][0][:2], lambda model: model.train())
