"""`fedveil status`: print the status of runs from their folders, even while they are training."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fedveil.cli.parser import Json
from fedveil.errors import BadArgument

RUN_HELP = "folder of a run, or a folder that contains runs, such as the workspace of a FLARE server"
KIT_HELP = "startup kit of a FLARE user; RUN is then the ID of a job on the FLARE server"
MAX_CLIENTS = 50  # maximum number of clients to print


def status(
    run: Annotated[Path, Positional, arg(metavar="RUN", help=RUN_HELP)],
    kit: Annotated[Path | None, arg(help=KIT_HELP, help_behavior_hint="")] = None,
    user: Annotated[str, arg(help="for --kit: name of the user")] = "admin@lab.org",
    as_json: Json = False,
) -> None:
    """Print progress, clients, privacy budget and expected end of each run."""
    if kit is not None:
        from fedveil.nvflare import read_progress

        print(read_progress(kit, user, str(run)))
        return
    from fedveil.federation.status import CLIENT_COLUMNS, describe_status, find_runs, list_clients, read_status

    runs = find_runs(run)
    if not runs:
        message = "neither this folder nor its subfolders contain a status.json"
        raise BadArgument(str(run), message, "use the folder that was passed to fit(folder=...) or --out")
    for index, folder in enumerate(runs):
        result = read_status(folder)
        if as_json:
            print(json.dumps({"folder": str(folder), "expected_end": result.expected_end, **asdict(result)}))
            continue
        print(*([""] if index else []), folder, sep="\n" if index else "")
        lines = describe_status(result, time.time())
        width = max(13, *map(len, lines))
        for name, value in lines.items():
            print(f"  {name:<{width}} {value}")
        rows = [list(CLIENT_COLUMNS), *list_clients(result)[:MAX_CLIENTS]] if result.clients else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print(("    " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip())
        if len(result.clients) > MAX_CLIENTS:
            print(f"    and {len(result.clients) - MAX_CLIENTS:,} more (--json prints all)")
