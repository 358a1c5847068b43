"""A server that writes what the tests compare."""

from flwr.serverapp import ServerApp
from tests.deployed.serving import serve

from fedveil.flower import Server

app = ServerApp()


@app.main()
def main(grid, context):
    serve(lambda *given, **named: Server(grid, *given, **named), context.run_config)
