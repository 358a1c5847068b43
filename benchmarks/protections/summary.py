"""Collect the cells into results, and the results into tables.

Some figures are the same by construction. They are measured once, and every other row that shows them names the row
that they come from:

- Veil and secure aggregation give the model of plain training, up to rounding, so its members are inferred as well.
- With the noise removed, a client's copy is the model.
- Under a veil the server sees the same gradients, because it removes its own noise.
- With noise by clients, five shares for which four are enough, a sum has more noise than with noise by the server, so
  its members are inferred at most as well; under a veil it has still more.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.protections.inversion import FEW, ROUNDS, batch_of
from benchmarks.protections.members import MODEL, TARGETS, VEILED
from benchmarks.protections.tasks import CLIENTS, DELTA, NONE, PROTECTIONS, TASKS, VEIL, Protection, noise_multiplier
from benchmarks.protections.training import BROADCASTS, OBSERVATIONS
from fedveil.attacks.scores import average

Cells = Mapping[str, Any]
Row = dict[str, Any]
ATTACKS = ("LiRA", "LiRA offline", "RMIA", "RMIA, losses", "loss")


def summarise(cells: Cells, seeds: Mapping[str, int], machine: str) -> Row:
    """Return all figures, by data set and protection."""
    return {
        "machine": machine,
        "clients": CLIENTS,
        "delta": DELTA,
        "targets": TARGETS,
        "rounds": ROUNDS,
        "observations": OBSERVATIONS * BROADCASTS,
        "seconds": round(sum(cell["seconds"] for cell in cells.values())),
        "data": {name: collect(cells, name, own) for name, own in seeds.items()},
    }


def collect(cells: Cells, name: str, seeds: int) -> Row:
    """Return all figures of a data set, by protection."""
    task = TASKS[name]
    settings = {**vars(task), "seeds": seeds, "batch": batch_of(name)}
    settings["noise"] = {f"{own:g}": noise_multiplier(name, own) for own in (8.0, 3.0, 1.0)}
    return {"settings": settings, "rows": {own.label: collect_row(cells, name, own, seeds) for own in PROTECTIONS}}


def collect_row(cells: Cells, name: str, own: Protection, seeds: int) -> Row:
    """Return the figures of one protection."""
    values = [cells[f"{name}-accuracy-{own.slug}-{seed}"]["value"] for seed in range(seeds)]
    clear, summed = Protection(epsilon=own.epsilon), Protection(secure=own.secure, epsilon=own.epsilon)
    noisy = own.secure and own.epsilon is not None
    inferred = cells[f"{name}-members-{own.epsilon or 0:g}-{MODEL}"]
    bound = {} if own.epsilon is None else {"bound": best_auc(own.epsilon)}
    row: Row = {
        "metric": estimate(values),
        "cost": cells[f"{name}-cost"][own.label],
        "final": {**member_figures(inferred), **bound, "from": clear.label, "more noise": noisy},
        "server": {**server_figures(cells, name, summed), "more noise": noisy and own.veil},
    }
    if own.veil:
        seen = Protection(veil=True, epsilon=own.epsilon)
        row["copy"] = {**copy_figures(cells, name, seen, seeds), "from": seen.label}
        if own.epsilon is None:
            veiled = cells[f"{name}-members-0-{VEILED}"]
            row["received"] = {**member_figures(veiled), "from": VEIL.label}
    return row


def estimate(values: Sequence[float]) -> list[float]:
    """Return the mean with Student's 95 % interval."""
    found = average(values)
    return [found.value, found.low, found.high]


def best_auc(epsilon: float) -> float:
    """Return the largest AUC that (epsilon, 0) allows: TPR <= exp(epsilon) FPR, and the same with roles exchanged.

    Delta adds at most delta to TPR, far less than the digits shown.
    """
    return 1 / (1 + math.exp(-epsilon))


def member_figures(cell: Row) -> Row:
    """Return AUC and TPR of each attack, over pairs of targets, and the name of the attack with the largest AUC."""
    found: Row = {attack: {key: estimate(values) for key, values in cell[attack].items()} for attack in ATTACKS}
    return {**found, "best": max(ATTACKS, key=lambda attack: found[attack]["auc"][0])}


def server_figures(cells: Cells, name: str, own: Protection) -> Row:
    """Return the share of rounds in which the server knows a record; the worse of a new and a trained network."""
    found: Row = {"from": own.label}
    for count, key in ((FEW, "one"), (batch_of(name), "batch")):
        pair = {phase: cells[f"{name}-inversion-{own.slug}-{count}-{phase}"] for phase in ("new", "trained")}
        phase = max(pair, key=lambda one: pair[one]["known"][0])
        found[key] = {"network": phase, **{part: pair[phase][part] for part in ("known", "gain", "chance", "records")}}
    return found


def copy_figures(cells: Cells, name: str, own: Protection, seeds: int) -> Row:
    """Return agreement with the server's model and the copy's metric, by attacker."""
    found = [cells[f"{name}-copy-{own.slug}-{seed}"] for seed in range(seeds)]
    return {
        "constant": estimate([one["constant"] for one in found]),
        "server": estimate([one["server"] for one in found]),
        **{
            part: {attacker: estimate([one[part][attacker] for one in found]) for attacker in found[0][part]}
            for part in ("agreement", "metric")
        },
    }


def percent(figure: Sequence[float]) -> str:
    """Format a fraction with its interval in per cent."""
    value, low, high = (f"{100 * max(0.0, min(1.0, end)):.1f}" for end in figure)
    return f"{value} [{low}, {high}]"


def three(figure: Sequence[float]) -> str:
    """Format a figure with its interval to three decimals."""
    value, low, high = (f"{end:.3f}" for end in figure)
    return f"{value} [{low}, {high}]"


def quality(metric: str, figure: Sequence[float]) -> str:
    """Format the task's metric: accuracy in per cent, or an AUC."""
    return percent(figure) if metric == "accuracy" else three(figure)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)] + [""]


def write_tables(results: Row) -> str:
    """Return all tables as a page in Markdown."""
    names = " ".join(results["data"])
    lines = ["# What each protection costs, and what each attacker gets", ""]
    lines += [f"`python -m benchmarks.protections --data {names}`", ""]
    lines += [f"{results['machine']}; {results['seconds'] / 60:.0f} minutes of CPU time on one core.", ""]
    for name, own in results["data"].items():
        lines += [f"## {name}", "", describe_task(own["settings"], results), "", *data_tables(own, results)]
    return "\n".join(lines).rstrip() + "\n"


def describe_task(own: Row, results: Row) -> str:
    """Describe the federation in a line."""
    size = f"the first {own['records']:,} training and test records; " if own["records"] else ""
    noise = ", ".join(f"{value:.2f} for epsilon {epsilon}" for epsilon, value in own["noise"].items())
    return (
        f"{size}{results['clients']} clients, {own['hidden']} hidden units, {own['rounds']} rounds, "
        f"rate {own['rate']:g} ({own['batch']} records per client), Adam {own['lr']:g}; clip {own['clip']:g}, "
        f"delta {results['delta']:g}, noise {noise}. Accuracy and copies: mean over {own['seeds']} seeds. Intervals "
        "are 95 % intervals; for times, they are quartiles."
    )


def data_tables(own: Row, results: Row) -> Sequence[str]:
    """Return the tables of one data set."""
    metric, rows, batch = own["settings"]["metric"], own["rows"], own["settings"]["batch"]
    unit = ", %" if metric == "accuracy" else ""
    costs = [
        [
            label,
            quality(metric, row["metric"]),
            f"{row['cost']['ms']:.1f}",
            "{:.1f} [{:.1f}, {:.1f}]".format(*row["cost"]["ratio"]),
            f"{row['cost']['down'] / 1000:.0f}",
            f"{row['cost']['up'] / 1000:.0f}",
        ]
        for label, row in rows.items()
    ]
    members = [
        [label, *(f(row["final"][a][k]) for a in ATTACKS for k, f in FORMATS.items())]
        for label, row in rows.items()
        if row["final"]["from"] == label
    ]
    veiled = rows[VEIL.label]["received"]
    members.append(["veil, one broadcast as received", *(f(veiled[a][k]) for a in ATTACKS for k, f in FORMATS.items())])
    server = [
        [label, *(cell for key in ("one", "batch") for cell in server_cells(row["server"][key]))]
        for label, row in rows.items()
        if row["server"]["from"] == label
    ]
    copies = [
        [label, attacker, percent(row["copy"]["agreement"][attacker]), quality(metric, row["copy"]["metric"][attacker])]
        for label, row in rows.items()
        if row.get("copy", {}).get("from") == label
        for attacker in row["copy"]["agreement"]
    ]
    ways = [f"{attack}, {key}" for attack in ATTACKS for key in ("AUC", "TPR at 1 % FPR, %")]
    rounds = [f"{words}: {part}" for words in ("one record per client", f"{batch} records") for part in SERVER_PARTS]
    return [
        *overview(own),
        "Above: answers that a client's model shares with the server's; rounds in which the server rebuilds a record "
        "(with one record per client); pairs of records told apart (at most, by any attacker).",
        "",
        *table(["protection", f"test {metric}{unit}", "ms per round", "over none", "kB down", "kB up"], costs),
        f"Members, from the final model ({results['targets']} targets in pairs, 16 shadows each):",
        "",
        *table(["protection", *ways], members),
        f"Records that the server rebuilds ({results['rounds']} rounds each):",
        "",
        *table(["protection", *rounds], server),
        f"A client's copy (guessing: {percent(rows[VEIL.label]['copy']['constant'])} % agreement):",
        "",
        *table(["protection", "attacker", "agreement, %", f"{metric}{unit} of the copy"], copies),
    ]


def overview(own: Row) -> list[str]:
    """Return a table for readers who do not know these attacks: a row for each protection, a column for each reader."""
    metric, rows = own["settings"]["metric"], own["rows"]
    header = ["protection", "the other organisations", "the server", "whoever gets the final model"]
    lines = [
        [
            label,
            describe_copy(label, row),
            named_source(label, row["server"]) or describe_server(row["server"]),
            named_source(label, row["final"]) or describe_members(row["final"]),
            short_percent(row["metric"][0]) if metric == "accuracy" else f"{row['metric'][0]:.3f}",
            describe_cost(row["cost"], rows[NONE.label]["cost"]),
        ]
        for label, row in rows.items()
    ]
    return table([*header, "accuracy" if metric == "accuracy" else "AUC", "time, bytes"], lines)


def short_percent(fraction: float, decimals: int = 1) -> str:
    """Format a fraction in per cent."""
    return f"{round(100 * fraction, decimals):g} %"


def named_source(label: str, own: Row) -> str:
    """Name the row whose figures are the same by construction; "" for figures of this row."""
    if own["from"] == label:
        return ""
    return f"at most as {own['from']}" if own.get("more noise") else f"as {own['from']}"


def describe_copy(label: str, row: Row) -> str:
    """Return how often a client's model gives the server's answers: as received, and with the noise removed."""
    if "copy" not in row:
        return short_percent(1.0)
    agreement = row["copy"]["agreement"]
    both = ", then ".join(short_percent(agreement[name][0], 0) for name in (PUBLISHED, TWO))
    return named_source(label, row["copy"]) or both


def describe_server(own: Row) -> str:
    """Return how often the server rebuilds a record: with the task's batches, and with one record per client."""
    return f"{short_percent(own['batch']['known'][0])} ({short_percent(own['one']['known'][0])})"


def describe_members(own: Row) -> str:
    """Return how well the best attack infers members and, with differential privacy, how well any attack could."""
    bound = f" (at most {short_percent(own['bound'])})" if "bound" in own else ""
    return short_percent(own[own["best"]]["auc"][0]) + bound


def describe_cost(own: Row, none: Row) -> str:
    """Return the time and the bytes of a round, over no protection."""
    size = (own["down"] + own["up"]) / (none["down"] + none["up"])
    return f"{own['ratio'][0]:.1f}, {size:.1f}"


PUBLISHED, TWO = "as published", "two broadcasts, no data"

FORMATS = {"auc": three, "tpr": percent}
SERVER_PARTS = ("rounds with a known record, %", "dB over the mean record", "network", "known by chance, %")


def server_cells(own: Row) -> list[str]:
    """Return the cells of one view of the server."""
    return [percent(own["known"]), f"{own['gain']:.1f}", own["network"], f"{100 * own['chance']:.0f}"]
