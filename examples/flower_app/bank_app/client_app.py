"""The client app, which defines the client's model and data; Fedveil does the rest."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from bank_app.task import load_part, make_model
from fedveil.flower import answer

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one message of the server."""
    return answer(message, context, make_model(context.run_config), lambda: load_part(context))
