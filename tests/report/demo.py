"""A realistic page: a plain and a veiled run beside a control, as the studies show them."""

import math
import random

from fedveil.report import Curves, Facts, Interval, Intervals, Matrix, Picture, Pictures, SideBySide, Table, Text

TITLE = "Digits, ten clients, veiled"
VERDICT = "The veiled run reached 97.19% accuracy, the plain run 97.19%: the same in every round to 3e-7."
COMMAND = "fedveil compare digits --clients 10 --rounds 20 --defence veil --seed 7 --out runs/digits-veil"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _accuracy(draw, top, speed):
    return [(float(k), top - (top - 0.1) * math.exp(-k / speed) + draw.gauss(0, 0.003)) for k in range(1, 21)]


def _errors(draw, power):
    return [(float(k), 10 ** (power + 0.25 * draw.gauss(0, 1) + k / 900)) for k in range(1, 501)]


def _matrices(title, labels, right):
    counts = [[right if truth == answer else (truth * answer) % 4 for answer in range(10)] for truth in range(10)]
    return SideBySide(title, [Matrix(name, labels, counts) for name in ("Plain", "Veiled")])


def _curves(draw):
    plain = _accuracy(draw, 0.974, 3.2)
    runs = {"plain": plain, "veil": [(x, y + draw.gauss(0, 1e-7)) for x, y in plain]}
    runs["control: noise not removed"] = _accuracy(draw, 0.41, 6)
    errors = {"float32": _errors(draw, -6.6), "float64": _errors(draw, -14.6)}
    note = "Control: the server skips the recovery. It must fail."
    return [
        Curves("Accuracy", "round", "test accuracy", runs, note=note),
        Curves("Error of recovery", "round", "relative error", errors, log_y=True),
    ]


def _losses(draw):
    loss = [(float(k), 2.3 * math.exp(-k / 4000) + 0.05 + abs(draw.gauss(0, 0.08))) for k in range(20_000)]
    times = {"plain": [(1, 0.02), (2, 0.03), (5, 0.05), (10, 0.1)], "veil": [(1, 0.021), (2, 0.033), (10, 0.104)]}
    veiled = [(x, y * (1 + 1e-6)) for x, y in loss]
    training = Curves("Training loss", "step", "loss", {"plain": loss, "veil": veiled})
    return SideBySide("Loss and time", [training, Curves("Seconds per round", "clients", "seconds", times)])


def _audit(draw):
    found = {"no defence": (0.872, 0.881), "PPDL": (0.803, None), "veil": (0.507, 0.518)}
    rows = []
    for group, aucs in found.items():
        for name, auc in zip(("as published", "adaptive"), aucs, strict=True):
            ends = (auc - 0.02, auc + 0.02 + draw.random() / 99) if auc else (None, None)
            rows.append(Interval(name, auc, *ends, group, "failed: out of memory"))
    rates = [10 ** (-4 + index / 20) for index in range(81)]
    powers = {"chance": 1.0, "no defence": 0.3, "veil": 0.97}
    roc = {name: [(0.0, 0.0), *((rate, rate**power) for rate in rates)] for name, power in powers.items()}
    lines = {"chance": 0.5, "undefended": 0.872}
    return [
        Intervals("Audit", "AUC of the best attack", rows, lines, high=1.0, note="95% intervals, 5 seeds."),
        Curves("ROC", "false positive rate", "true positive rate", roc, log_x=True, log_y=True),
    ]


def _pictures(draw):
    def picture(noise, caption=""):
        pixels = (int((1 - noise) * (7 * k % 256) + noise * draw.randrange(256)) for k in range(32 * 32 * 3))
        return Picture(32, 32, 3, bytes(pixels), caption)

    rows = [
        ("original", [picture(0.0) for _ in range(12)]),
        ("recovered from a plain update", [picture(0.2, f"{31 - k}.2 dB") for k in range(12)]),
        ("recovered from a veiled update", [picture(1.0, "7.1 dB") if k != 3 else None for k in range(12)]),
    ]
    return Pictures("Pictures recovered", [f"image {k + 1}" for k in range(12)], rows, note="PSNR under each picture.")


def sections():
    """The sections of the page, the same at every call."""
    draw = random.Random(1)
    header = ["data / model", "paper", "plain", "veil", "difference", "seconds per round", "verdict"]
    rows = [
        ["digits / mlp", "97.4", "97.33 ± 0.21", "97.33 ± 0.21", "2.1e-7", "0.04", "ok"],
        ["cifar / resnet20", "86.1", "failed: out of memory", "84.20", "-", "12.40", "outside tolerance"],
    ]
    return [
        *_curves(draw),
        *_audit(draw),
        _pictures(draw),
        _matrices("Confusion", [*"0123456789"], 172),
        _matrices("Confusion, CIFAR-10", CLASSES, 142),
        Table("Results", header, rows, note="Tolerance 0.6 points."),
        _losses(draw),
        Facts("Configuration", {"model": "MLP 64-128-10", "folder": "runs/2025-11-02T10-22-31/" * 3}),
        Text("What this does not show", ["Timing is of one process.", "Colluding clients are not considered."]),
    ]
