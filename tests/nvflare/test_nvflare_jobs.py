"""A job refuses arguments that FLARE would change on their way to the server and the sites."""

import json

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from nvflare.collab import collab

from fedveil.errors import BadArgument
from fedveil.nvflare import Client, Job


class Settings(Client):
    def __init__(self, config):
        self.config = config

    def make_model(self):
        raise AssertionError("a job makes no model")

    def load_data(self, site):
        raise AssertionError("a job loads no records")


class Main:
    def __init__(self, config):
        self._config = config

    @collab.main
    def run(self):
        raise AssertionError("a job does not run before it is submitted")


def arguments(folder, file, name):
    """What FLARE's own reader makes of the arguments in an exported job."""
    from nvflare.fuel.utils.json_scanner import JsonScanner
    from nvflare.fuel.utils.wfconf import resolve_var_refs

    config = json.loads(next(folder.rglob(file)).read_text())
    resolve_var_refs(JsonScanner(config), {})
    (found,) = (part["args"]["config"] for part in config["components"] if part["path"].endswith(name))
    return found


def test_flare_leaves_arguments_without_braces_alone(tmp_path):
    config = {"privacy": {"noise": 1.0, "noise_by": "clients"}, "text": "rate = 0.5\nclip = 1", "list": ["a {b} c"]}
    Job("own", Main(config), Settings(config)).export(str(tmp_path))
    assert arguments(tmp_path, "config_fed_server.json", "Main") == config
    assert arguments(tmp_path, "config_fed_client.json", "Settings") == config


@pytest.mark.parametrize("text", ['{"noise": 1.0, "rate": 0.5}', "{name}", " {} ", "{{name}}"])
def test_text_that_flare_takes_for_a_variable_is_refused(text):
    """FLARE ends such a job, or passes None, without telling the user who submits it."""
    for config in (text, {"privacy": text}, {"privacy": ["a", text]}):
        with pytest.raises(BadArgument, match=r"Settings\.config.*is in braces"):
            Job("own", Main({}), Settings(config))
        with pytest.raises(BadArgument, match=r"Main\.config.*is in braces"):
            Job("own", Main(config), Settings({}))
