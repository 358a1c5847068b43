"""Servers on one grid take rounds in turn."""

from functools import partial

from benchmarks.in_turn import rounds_in_turn
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.flower import Server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write what each round took."""
    rounds_in_turn(partial(Server, grid), context.run_config)
