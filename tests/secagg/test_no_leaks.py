"""Shares, keys and seeds appear in no repr, text, exception, log, or message that should not hold them."""

import base64
import logging
import traceback

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.secagg.group import DIGEST, Attempt, settle_all, upload

from fedveil.errors import FedveilError
from fedveil.secagg import Identity, Memory, Party, Tally, masks, messages


def forms(secret):
    """How a secret may be written, whole or in its first 12 bytes; as a number too."""
    for part in (secret, secret[:12]):
        yield from (part.hex(), part.hex().upper(), repr(part)[2:-1], str(list(part))[1:-1])
        yield base64.b64encode(part).decode().rstrip("=")[:-1]
        yield base64.urlsafe_b64encode(part).decode().rstrip("=")[:-1]
    yield str(int.from_bytes(secret, "big"))
    yield str(int.from_bytes(secret, "little"))


def shown(texts, secrets):
    """Which secrets stand in which texts, in any form."""
    wanted = {name: [*forms(secret)] for name, secret in secrets.items()}
    return [(name, text[:80]) for text in texts for name, found in wanted.items() if any(f in text for f in found)]


@pytest.fixture
def planted(monkeypatch):
    """All seeds and shares that are drawn or derived while the test runs."""
    found = {}

    def kept(name):
        original = getattr(masks, name)

        def wrapped(*arguments):
            value = original(*arguments)
            if isinstance(value, bytes):
                found[f"{name} {len(found)}"] = value
            return value

        monkeypatch.setattr(masks, name, wrapped)

    for name in ("new_seed", "pair_seed", "share_key", "agree", "unseal"):
        kept(name)
    return found


def keys_of(group):
    found = {f"identity {name}": identity._key.private_bytes_raw() for name, identity in group.identities.items()}
    for name, memory in group.memories.items():
        with memory.turn() as turn:
            found[f"key {name}"] = turn.state.runs[group.run].key
    return found


def everything_said(thing):
    return [repr(thing), str(thing), f"{thing}", format(thing)]


def test_the_search_finds_what_is_planted():
    secret = bytes(range(60, 92))
    for text in (secret.hex(), str(secret), base64.b64encode(secret).decode(), f"x{int.from_bytes(secret, 'big')}y"):
        assert shown([text], {"planted": secret})
    assert shown([f"seed {secret[:12].hex()}..."], {"planted": secret})
    assert not shown(["nothing"], {"planted": secret})


def test_no_object_shows_a_secret(planted):
    a = Attempt(4)
    group, tally, texts = a.group, a.tally, []
    for data in a.sent.values():
        texts += everything_said(messages.Upload.from_bytes(data, 4, 3))
    common, own = tally.settle()
    for name in group.names[:3]:
        data = group.parties[name].settle(common, own[name])
        texts += everything_said(messages.SettleReply.from_bytes(data, 0))
        tally.take_settle_reply(name, data)
    for memory in group.memories.values():
        with memory.turn() as turn:
            texts += everything_said(turn) + everything_said(turn.state.runs[group.run])
            texts += everything_said(turn.state.runs[group.run].current) + everything_said(turn.state.runs)
    settle_all(group, tally)
    for name, data in a.revealed().items():
        texts += everything_said(messages.RevealReply.from_bytes(data))
        tally.take_reveal_reply(name, data)
    for thing in (tally, *group.parties.values(), *group.memories.values(), *group.identities.values(), a.opening):
        texts += everything_said(thing)
    for name in tally.survivors:
        assert '"current":null' in group.memories[name].to_bytes().decode()  # no share is left
    assert len(planted) > 50
    assert len(texts) > 100
    assert not shown(texts, planted | keys_of(group))


def test_no_error_or_log_line_shows_a_secret(planted, caplog, tmp_path, capfd):
    caplog.set_level(logging.DEBUG)
    a, texts = Attempt(4), []
    group = a.group

    def fails(call, *arguments):
        try:
            call(*arguments)
        except FedveilError as error:
            texts.append("".join(traceback.format_exception(error)) + repr(error) + str(error))
        else:
            raise AssertionError("it did not fail")

    tally = Tally(a.opening, DIGEST, group.roster)
    for name, data in a.sent.items():
        fails(tally.take_upload, name, data[:-1])
        fails(tally.take_upload, name, b"\xff" * 8 + data)
        fails(upload, group.parties[name], a.opening, DIGEST, a.vectors[name])
        tally.take_upload(name, data)
    common, own = tally.settle()
    for name in group.names:
        party = group.parties[name]
        fails(party.settle, common, own[name][:-1])
        data = party.settle(common, own[name])
        fails(party.settle, common, own[name])
        fails(tally.take_settle_reply, name, data[:-1])
        tally.take_settle_reply(name, data)
    message = tally.reveal()
    for name in group.names:
        party = group.parties[name]
        fails(party.reveal, message[:-64])
        data = party.reveal(message)
        fails(party.reveal, message)
        wrong = bytearray(data)
        wrong[-1] ^= 1
        fails(tally.take_reveal_reply, name, data[:-1])
        fails(tally.take_reveal_reply, name, bytes(wrong))
    fails(tally.total)
    secrets = planted | keys_of(group)
    path = group.identities["c0"].save(tmp_path / "a.key")
    fails(group.identities["c0"].save, path)
    path.write_text(path.read_text().replace('private = "', 'private = "0'))
    fails(Identity.load, path)
    fails(Memory.from_bytes, group.memories["c0"].to_bytes() + b"}")
    path.write_bytes(group.memories["c0"].to_bytes()[:-1])
    fails(Party(group.identities["c0"], group.roster, Memory(path)).hello, "run")
    path.chmod(0o644)
    fails(Identity.load, path)
    assert len(texts) > 30
    captured = capfd.readouterr()
    assert not shown([*texts, caplog.text, captured.out, captured.err], secrets)


def test_clients_send_no_key_and_no_seed_in_the_clear(planted):
    """M2 holds seeds and shares encrypted only; M4 holds pair seeds with those outside only."""
    a = Attempt(4, absent=1)
    group, tally = a.group, a.tally
    known = planted | keys_of(group)
    assert not [name for name, secret in known.items() if any(secret in data for data in a.sent.values())]
    private = {name: X25519PrivateKey.from_private_bytes(known[f"key {name}"]) for name in group.names[:3]}
    seeds = {name: masks.agree(key, group.hellos["c3"].key) for name, key in private.items()}
    for name, data in a.answers(*tally.settle()).items():
        opened = {secret for secret in planted.values() if len(secret) == 32 and secret in data}
        assert opened == {masks.pair_seed(seeds[name], tally._context, name, "c3")}
        tally.take_settle_reply(name, data)
    for data in a.revealed().values():
        assert not any(len(secret) == 32 and secret in data for secret in (planted | keys_of(group)).values())
