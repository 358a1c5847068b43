"""Every class of a package of models, built from a tiny config with random weights and used as its users write it.

    PYTHONPATH=src python -m benchmarks.zoo --packages transformers [--limit N] [--only TEXT] [--results FILE]

A class is analysed with a batch as a tokenizer or image processor returns it; its gradients in float64 are compared
with those of autograd. Each class runs in a separate process with limited CPU time. Results are appended to a file of
JSON lines; classes that it already contains are not run again. The table shows "exact", "wrong" or "refused" with the
reason, the coverage and the seconds of CPU time. Classes that cannot be built from a tiny config are "not built".
"""

import argparse
import importlib
import json
import multiprocessing
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.timing import table

BOUND = 1e-9
PACKAGES = {  # modules with names() and measure(name)
    "transformers": "benchmarks.zoo_transformers",
    "torchvision": "benchmarks.zoo_torchvision",
    "timm": "benchmarks.zoo_timm",
    "monai": "benchmarks.zoo_monai",
    "segmentation_models_pytorch": "benchmarks.zoo_segmentation",
    "torch_geometric": "benchmarks.zoo_geometric",
    "peft": "benchmarks.zoo_peft",
}
SECONDS = 180.0  # of CPU time
WAIT = 30  # multiple of it that a class may take on a busy machine


def run(package: str, name: str, seconds: float) -> dict[str, object]:
    """Measure one class in a process of its own, which ends after this much CPU time."""
    began, context = time.monotonic(), multiprocessing.get_context("fork")  # the package is imported only once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(package, name, seconds, sender))
    process.start()
    process.join(WAIT * seconds)
    process.kill()
    process.join()
    if receiver.poll():
        result = receiver.recv()
    elif process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        result = {"result": "failed", "reason": f"more than {seconds:g} s or the memory that is free"}
    else:
        result = {"result": "failed", "reason": f"exit code {process.exitcode}"}
    return {"package": package, "name": name, **result, "total_seconds": round(time.monotonic() - began, 1)}


def _measure(package: str, name: str, seconds: float, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
    sender.send(importlib.import_module(PACKAGES[package]).measure(name))


def read(path: Path) -> dict[tuple[str, str], dict[str, object]]:
    """Return the results in a file, by package and class."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.strip()]
    return {(own["package"], own["name"]): own for own in found}


def show(results: Sequence[dict[str, object]]) -> str:
    """Return the table and the counts of each result."""
    header = ["class", "result", "coverage %", "error", "seconds", "output, loss or reason"]
    rows = [[str(own["name"]), str(own["result"]), *_columns(own)] for own in results]
    counts = Counter(str(own["result"]) for own in results)
    return table(header, rows) + "\n\n" + ", ".join(f"{count} {what}" for what, count in counts.most_common())


def _columns(own: dict[str, object]) -> list[str]:
    if "error" not in own:
        return ["", "", str(own.get("seconds", own["total_seconds"])), str(own.get("reason", ""))[:150]]
    coverage, error = own["coverage"], own["error"]
    assert isinstance(coverage, float)
    assert isinstance(error, float)
    return [f"{100 * coverage:.1f}", f"{error:.1e}", str(own["seconds"]), str(own["note"])]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the classes that have no result yet; 1 if any gradient is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="Analyse every class of a package.")
    parser.add_argument("--packages", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    parser.add_argument("--limit", type=int, help="run at most this many classes of each package")
    parser.add_argument("--only", default="", help="only classes whose name contains this text")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the CPU time of a class")
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"), help="where results are appended")
    arguments = parser.parse_args(argv)
    known = read(arguments.results)
    chosen: list[dict[str, object]] = []
    for package in arguments.packages:
        names, fresh = importlib.import_module(PACKAGES[package]).names(), 0
        for name in [own for own in names if arguments.only in own]:
            if (package, name) not in known:
                if arguments.limit is not None and fresh >= arguments.limit:
                    break
                fresh += 1
                known[package, name] = run(package, name, arguments.seconds)
                with arguments.results.open("a") as file:
                    file.write(json.dumps(known[package, name]) + "\n")
                print(name, known[package, name]["result"], file=sys.stderr, flush=True)
            chosen.append(known[package, name])
    print(show(chosen))
    return int(any(own["result"] == "wrong" for own in chosen))


if __name__ == "__main__":
    sys.exit(main())
