"""Default settings for record-level differential privacy; they depend only on the public number of records."""

SAMPLE_SIZE = 1024  # expected number of records per round
MAX_RATE = 0.5
PASSES = 30  # expected number of passes over the records
MIN_ROUNDS, MAX_ROUNDS = 150, 600
CLIP = 2.0


def default_rate(records: int) -> float:
    """Return a sampling rate: 1,024 records per round, but at most half of all records.

    >>> default_rate(1438), default_rate(32950)
    (0.5, 0.031)
    """
    return float(f"{min(MAX_RATE, SAMPLE_SIZE / records):.2g}")


def default_rounds(rate: float) -> int:
    """Return a number of rounds: 30 passes over the records, but at least 150 and at most 600 rounds.

    >>> default_rounds(0.5), default_rounds(0.1), default_rounds(0.031)
    (150, 300, 600)
    """
    return min(MAX_ROUNDS, max(MIN_ROUNDS, round(PASSES / rate)))


def default_lr(rounds: int) -> float:
    """Return a learning rate for Adam with a cosine schedule: 3 / rounds.

    >>> default_lr(150), default_lr(594)
    (0.02, 0.0051)
    """
    return float(f"{3 / rounds:.2g}")
