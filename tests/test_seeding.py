"""Tests draw from seeded sources only, whatever the order they run in."""

import os
import random
import secrets
import uuid

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests import seeding

import fedveil


def draw():
    """One number or more from every source that the library or a test may use."""
    return (
        os.urandom(8),
        secrets.token_bytes(8),
        secrets.randbelow(1 << 60),
        uuid.uuid4(),
        random.random(),
        random.SystemRandom().random(),
        np.random.default_rng().random(),
        np.random.rand(),
        torch.rand(()).item(),
        Ed25519PrivateKey.generate().private_bytes_raw(),
        X25519PrivateKey.generate().private_bytes_raw(),
        fedveil.Entropy().token(),
    )


FIRST = draw()  # when the file is imported


@pytest.fixture(scope="module")
def shared():
    return draw()


def test_a_test_is_seeded_by_its_name_and_another_name_repeats_no_source(request):
    first = draw()
    seeding.seed_all("two")
    second = draw()
    seeding.seed_all(request.node.nodeid)
    assert draw() == first
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_files_and_shared_fixtures_are_seeded_by_their_names_too(shared, request):
    seeding.seed_all(f"{request.node.parent.nodeid}::shared[0]")
    assert draw() == shared
    seeding.seed_all(request.node.parent.nodeid)
    assert draw() == FIRST


def test_a_forked_process_draws_numbers_unlike_its_parents():
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, os.urandom(16))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16) != os.urandom(16)
    os.close(reader)
    os.close(writer)
