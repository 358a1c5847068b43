"""A client that says how it is connected, in a file of the folder `told` of the configuration."""

from pathlib import Path

from tests.nvflare.app.sites import TestClient

from fedveil.nvflare.client import transport


class Telling(TestClient):
    def make_model(self):
        (Path(self.config["told"]) / self._site).write_text(transport())
        return super().make_model()
