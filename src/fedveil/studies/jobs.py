"""Independent parts of a long computation: side by side on the cores there are, each kept when done.

A run that is stopped goes on: a cell whose result is on disk, made with the same arguments, is not computed again. A
cell that fails is a failed cell, and the others go on.
"""

import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from fedveil.errors import FedveilError
from fedveil.runs.folder import write_text

Tell = Callable[[float, str], None]  # the share that is done, and what is being done
Result = dict[str, Any]
POLL = 0.2  # seconds


@dataclass(frozen=True)
class Cell:
    """A call `function(tell, **arguments)` that gives plain values; the function can be imported by its name."""

    name: str
    function: Callable[..., Result]
    arguments: dict[str, Any] = field(default_factory=dict)


def asked(cell: Cell) -> str:
    """What decides a cell's result, as text."""
    values = ", ".join(f"{name}={value!r}" for name, value in sorted(cell.arguments.items()))
    return f"{cell.function.__module__}.{cell.function.__qualname__}({values})"


def kept(cell: Cell, folder: Path) -> Result | None:
    """The cell's result if it is on disk; one that failed or was asked otherwise does not count."""
    try:
        found = json.loads((folder / f"{cell.name}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    usable = isinstance(found, dict) and found.get("asked") == asked(cell) and "failed" not in found["result"]
    return found["result"] if usable else None


def run_cell(cell: Cell, folder: Path, tell: Tell) -> Result:
    """Compute a cell and keep its result; what goes wrong becomes {"failed": why}."""
    try:
        result = cell.function(tell, **cell.arguments)
    except FedveilError as error:
        result = {"failed": str(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{cell.name}.json", json.dumps({"asked": asked(cell), "result": result}) + "\n")
    return result


_news: Any = None  # where a worker process tells how far it is


def _start(news: Any, parent: int) -> None:
    global _news
    _news = news
    _watch(parent)
    torch.set_num_threads(1)  # a worker a core
    torch.set_flush_denormal(True)  # weights of dead units decay to denormals, which made a round seven times slower


def _watch(parent: int) -> None:
    """End this process when the one that asked for it is gone: two runs must never work in one folder."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)


def _work(cell: Cell, folder: Path) -> Result:
    return run_cell(cell, folder, lambda share, what: _news.put((cell.name, share, what)))


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    *,
    workers: int | None = None,
    show: Callable[[str, float, str], None] = lambda name, share, what: None,
) -> dict[str, Result]:
    """All results by name. `show` gets (cell, share that is done, what is being done); workers=1 stays in process."""
    done = {cell.name: result for cell in cells if (result := kept(cell, folder)) is not None}
    for name in done:
        show(name, 1.0, "kept")
    left = [cell for cell in cells if cell.name not in done]
    workers = min(len(left), workers or os.cpu_count() or 1)
    if workers <= 1:
        for cell in left:
            done[cell.name] = run_cell(cell, folder, lambda share, what, name=cell.name: show(name, share, what))  # type: ignore[misc]
            show(cell.name, 1.0, "done")
    else:
        done |= _side_by_side(left, folder, workers, show)
    return {cell.name: done[cell.name] for cell in cells}


def _side_by_side(
    cells: Sequence[Cell], folder: Path, workers: int, show: Callable[[str, float, str], None]
) -> dict[str, Result]:
    """Compute in worker processes; a fresh interpreter each, since a fork would copy torch's threads half alive."""
    context = multiprocessing.get_context("spawn")
    done: dict[str, Result] = {}
    manager = SyncManager(ctx=context)
    manager.start(_watch, (os.getpid(),))
    with manager:
        news = manager.Queue()
        with ProcessPoolExecutor(workers, context, _start, (news, os.getpid())) as pool:
            names: dict[Future[Result], str] = {pool.submit(_work, cell, folder): cell.name for cell in cells}
            pending = set(names)
            while pending:
                finished, pending = wait(pending, POLL)
                while not news.empty():
                    show(*news.get())
                for future in finished:
                    error = future.exception()
                    done[names[future]] = {"failed": f"its process died: {error}"} if error else future.result()
                    show(names[future], 1.0, "done")
    return done
