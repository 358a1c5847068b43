"""What secure aggregation costs: time beside its floor, and bytes beside float32.

    PYTHONPATH=src python -m benchmarks.secagg [--quick]

The floor is what no secure aggregation with these masks can do without: generating the same AES-CTR streams and
adding them to one vector. There are n for a client (its self mask and n - 1 pair masks), n for the server, and 2(n - 1)
for the server if one client vanishes. A client's time is all that it does in an attempt: admission, upload, settle and
reveal, and the server's tag on each of these three messages. "Client, words" is the encoding of an update in fixed
point with its check words, which comes before. The server's time is all that it does with n uploads, which it has as
bytes, up to their sum. Adding them up is not in its floor; "beside streams and sum" has that too. Keys are agreed
before, once per 50 rounds.

The plain sum is that of n float32 vectors. CKKS is TenSEAL's (encryption of one vector; n - 1 additions, decryption),
if it is installed. Variants take turns, in one process, and ratios are taken within a turn.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks.timing import Timings, compare, interleave, machine, table, verdict
from fedveil.secagg import Identity, Memory, Opening, Party, Policy, Roster, Tally, bits
from fedveil.secagg.fixed import Words, encode_rows
from fedveil.secagg.identity import admit_message, tag_message

SIZES, CLIENTS = (270_000, 2_700_000), (4, 10, 50)
MOST_TIME, MOST_BYTES = 1.5, 2.05
PIECE = 2**15
DIGEST = hashlib.sha256(b"broadcast").digest()
KEY = bytes(32)
TAGGED = tag_message(KEY, DIGEST)


@dataclass(frozen=True)
class Case:
    """Clients that have uploaded, and what they remember of it, so that every step can be repeated."""

    roster: Roster
    parties: Mapping[str, Party]
    memories: Mapping[str, Memory]
    opening: Opening
    words: Words
    sent: Mapping[str, bytes]
    before: bytes  # the first client's memory, before and after its upload
    after: Mapping[str, bytes]


def prepared(n: int, size: int) -> Case:
    """Clients and their uploads, all of them real; all mask the same words, since times do not depend on values."""
    identities = {f"c{place}": Identity.new(f"c{place}") for place in range(n)}
    roster = Roster({name: identity.public() for name, identity in identities.items()})
    memories = {name: Memory() for name in identities}
    policy = Policy(max_sums_per_run=2**40, max_sums_per_day=2**40)
    parties = {name: Party(own, roster, memories[name], policy=policy) for name, own in identities.items()}
    hellos = tuple(party.hello("benchmark") for party in parties.values())
    opening = Opening("benchmark", 0, 0, hellos, (9,), (size,))
    words = encoded(np.random.default_rng(0).standard_normal(size), opening)
    before = memories["c0"].to_bytes()
    sent = {name: party.upload(party.admit(opening, DIGEST), words) for name, party in parties.items()}
    after = {name: memory.to_bytes() for name, memory in memories.items()}
    return Case(roster, parties, memories, opening, words, sent, before, after)


def encoded(values: np.ndarray, opening: Opening) -> Words:
    """An update in fixed point, as a client of one record sends it."""
    behind = [bits(len(opening.roster), exponent) for exponent in opening.exponents]
    return np.concatenate([np.array([1, 1], np.uint64), encode_rows(values, opening.rows, behind, len(opening.roster))])


def remember(case: Case, name: str, state: bytes) -> None:
    """Set a client's memory back."""
    case.memories[name]._text = state.decode()


def answers(
    case: Case, lost: Sequence[str]
) -> tuple[list[dict[str, bytes]], dict[str, bytes], list[tuple[bytes, ...]]]:
    """What clients answer when some vanish after their upload: M4 by step, M6; and what the first one was asked."""
    for name, state in case.after.items():
        remember(case, name, state)
    tally = Tally(case.opening, DIGEST, case.roster)
    for name, data in case.sent.items():
        tally.take_upload(name, data)
    settled, asked = [], []
    while not tally.has_agreement():
        common, own = tally.settle()
        asked.append((common, own["c0"]))
        settled.append({name: case.parties[name].settle(common, own[name]) for name in own if name not in lost})
        for name, data in settled[-1].items():
            tally.take_settle_reply(name, data)
    message = tally.reveal()
    asked.append((message,))
    revealed = {name: case.parties[name].reveal(message) for name in tally.survivors}
    return settled, revealed, asked


def serve(case: Case, settled: Sequence[Mapping[str, bytes]], revealed: Mapping[str, bytes]) -> Words:
    """All that the server does in an attempt."""
    tally = Tally(case.opening, DIGEST, case.roster)
    for name, data in case.sent.items():
        tally.take_upload(name, data)
    for step in settled:
        tally.settle()
        for name, data in step.items():
            tally.take_settle_reply(name, data)
    tally.reveal()
    for name, data in revealed.items():
        tally.take_reveal_reply(name, data)
    return tally.total()


def take_part(case: Case, asked: Sequence[tuple[bytes, ...]]) -> None:
    """All that a client does in an attempt without dropouts; messages are hashed in any case."""
    for _ in range(3):
        admit_message(KEY, [KEY], DIGEST, TAGGED)
    upload(case)
    remember(case, "c0", case.after["c0"])  # the shares that the others hold are of the first upload
    case.parties["c0"].settle(*asked[0])
    case.parties["c0"].reveal(*asked[-1])


def upload(case: Case) -> None:
    """The part of it that grows with the vector."""
    remember(case, "c0", case.before)
    party = case.parties["c0"]
    party.upload(party.admit(case.opening, DIGEST), case.words)


def floor(keys: Sequence[bytes], size: int, vectors: Sequence[Words] = ()) -> Words:
    """AES-CTR streams, generated and added in pieces that fit the cache; and vectors, if there are any."""
    buffer, zeros = bytearray(8 * PIECE + 16), memoryview(bytes(8 * PIECE))
    stream = np.frombuffer(buffer, np.uint64, PIECE)
    ciphers = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor() for key in keys]
    total = np.zeros(size, np.uint64)
    for at in range(0, size, PIECE):
        piece = total[at : at + PIECE]
        for cipher in ciphers:
            cipher.update_into(zeros[: 8 * piece.size], buffer)
            piece += stream[: piece.size]
        for vector in vectors:
            piece += vector[at : at + PIECE]
    return total


def plain_sum(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """What a server without secure aggregation does."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def ckks(size: int, n: int) -> dict[str, Callable[[], object]]:
    """CKKS of TenSEAL, if it is installed: one client's encryption, and the server's sum with its decryption."""
    try:
        import tenseal  # type: ignore[import-not-found]
    except ImportError:
        return {}
    scheme = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 60])
    scheme.global_scale = 2**40
    values = np.random.default_rng(0).standard_normal(size)
    encrypted = tenseal.ckks_vector(scheme, values)

    def added() -> object:
        total = encrypted.copy()
        for _ in range(n - 1):
            total += encrypted
        return total.decrypt()

    return {"CKKS client": lambda: tenseal.ckks_vector(scheme, values).serialize(), "CKKS server": added}


def timed(case: Case, n: int, size: int, repetitions: int) -> Timings:
    """All variants of one case, in turn."""
    none, one = answers(case, []), answers(case, ["c1"])
    total = serve(case, *none[:2])
    if not np.array_equal(total, n * case.words) or not np.array_equal(serve(case, *one[:2]), (n - 1) * case.words):
        raise SystemExit("the sum is wrong")
    for name, state in case.after.items():
        remember(case, name, state)
    keys = [os.urandom(32) for _ in range(2 * n)]
    vectors = [np.random.default_rng(k).standard_normal(size, np.float32) for k in range(n)]
    received = [np.frombuffer(data, np.uint64, size + 1, 8) for data in case.sent.values()]
    values = np.random.default_rng(0).standard_normal(size)
    variants: dict[str, Callable[[], object]] = {
        "client": partial(take_part, case, none[2]),
        "client, words": partial(encoded, values, case.opening),
        "client, upload alone": partial(upload, case),
        "floor n": partial(floor, keys[:n], size + 1),
        "server": partial(serve, case, *none[:2]),
        "server, one vanished": partial(serve, case, *one[:2]),
        "floor 2(n - 1)": partial(floor, keys[: 2 * (n - 1)], size + 1),
        "floor n and sum": partial(floor, keys[:n], size + 1, received),
        "plain": partial(plain_sum, vectors),
    }
    return interleave(variants | ckks(size, n), repetitions, 1, warm_up=1)


def rows_of(n: int, size: int, repetitions: int) -> tuple[list[list[str]], bool]:
    """The rows of one case, and whether all goals are met."""
    case = prepared(n, size)
    found = timed(case, n, size, repetitions)
    met, rows = True, []
    for what, against, most in (
        ("client", "floor n", MOST_TIME),
        ("client, upload alone", "floor n", None),
        ("client, words", "floor n", None),
        ("server", "floor n", MOST_TIME),
        ("server", "floor n and sum", None),
        ("server, one vanished", "floor 2(n - 1)", MOST_TIME),
    ):
        by = compare(found, against)
        ratio = by[what].ratio
        goal, word = verdict(ratio[1], most)
        met &= word != "OVER"
        spread = f"{ratio[0]:.2f} - {ratio[2]:.2f}"
        times = f"{1e3 * by[what].seconds:.1f}", f"{1e3 * by[against].seconds:.1f}", f"{1e3 * by['plain'].seconds:.1f}"
        beside = " beside streams and sum" if against == "floor n and sum" else ""
        rows.append([f"{size:,} values, n = {n}: {what}{beside}", *times, f"{ratio[1]:.2f}", spread, goal, word])
    for what in [name for name in found.seconds if name.startswith("CKKS")]:
        rows.append(
            [f"{size:,} values, n = {n}: {what}", f"{1e3 * compare(found, what)[what].seconds:.1f}", *["-"] * 6]
        )
    ratio = len(case.sent["c0"]) / (4 * size)
    goal, word = verdict(ratio, MOST_BYTES)
    sizes = f"{len(case.sent['c0']):,} B", f"{4 * size:,} B"
    rows.append([f"{size:,} values, n = {n}: upload", sizes[0], "-", sizes[1], f"{ratio:.3f}", "-", goal, word])
    print(f"  {size:,} values, n = {n}: {found.kept}", file=sys.stderr, flush=True)
    return rows, met and word == "ok"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secagg", description="Time secure aggregation.")
    parser.add_argument("--quick", action="store_true", help="270,000 values and up to 10 clients, few repetitions")
    quick = parser.parse_args(argv).quick
    cases = [(n, size) for size in SIZES for n in CLIENTS if not quick or (size == SIZES[0] and n <= 10)]
    rows, met = [], True
    load = os.getloadavg()[0]
    for n, size in cases:
        found, kept = rows_of(n, size, 7 if quick else 15 if size * n < 2e7 else 7)
        rows, met = rows + found, met and kept
    print(table(["what", "ms", "floor ms", "plain ms", "ratio", "quartiles", "goal", ""], rows))
    print(f"{machine()}; load {load:.2f} before, {os.getloadavg()[0]:.2f} after")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
