"""Secure aggregation: a server adds up the clients' vectors and sees only the sum.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS 2017), with keys agreed once
per run and seeds derived for every attempt.

    M0  client   run, name, X25519 key, Ed25519 signature                        Party.hello
    M1  server   broadcast, round, attempt, roster with the M0s, exponents       Opening        Party.admit
    M2  client   words + PRG(b_k) +- PRG(s_kj), encrypted shares of b_k,         Party.upload   Tally.take_upload
                 commitments to b_k and every s_kj, hashes of the shares
    M3  server   step, remaining members V; at step 0, shares and their hashes   Tally.settle
    M4  client   signature over (context, step, V), s_kd for d outside V,        Party.settle   Tally.take_settle_reply
                 dealers of unusable shares; M3 again if someone drops out
    M5  server   at least t signatures on the last (step, V)                     Tally.reveal
    M6  client   once: shares of b_k for k in V                                  Party.reveal   Tally.take_reveal_reply
                                                                                 Tally.total

`rules` and `policy` define which messages a client refuses and which guarantees it has, `masks` defines how keys and
masks are derived, and `tally.Conduct` decides who is excluded. All messages come from one server, whose signature
`identity` checks.

Secure aggregation does not protect against a crafted model that is sent to every client, against differences between
sums over different members, or against poisoning: a hostile client can corrupt the sum. A client whose disk is restored
to an earlier state is not protected either: it still has its key, but no longer knows how the key was used.
"""

from fedveil.errors import Aborted
from fedveil.secagg.fixed import bits, decode, encode, exponent
from fedveil.secagg.identity import Identity, Roster
from fedveil.secagg.memory import Memory
from fedveil.secagg.messages import Hello, Opening
from fedveil.secagg.party import Party
from fedveil.secagg.policy import Policy
from fedveil.secagg.rules import MIN_MEMBERS, REASONS, colluders, threshold
from fedveil.secagg.tally import Conduct, Tally

__all__ = [
    "MIN_MEMBERS",
    "REASONS",
    "Aborted",
    "Conduct",
    "Hello",
    "Identity",
    "Memory",
    "Opening",
    "Party",
    "Policy",
    "Roster",
    "Tally",
    "bits",
    "colluders",
    "decode",
    "encode",
    "exponent",
    "threshold",
]
