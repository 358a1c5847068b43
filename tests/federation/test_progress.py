"""A progress bar in terminals and notebooks, with the monitored metric; nothing elsewhere."""

import io
import sys
from types import SimpleNamespace

import pytest
from tests.small import federation, pairs

from fedveil.errors import BadArgument

TEST = pairs(10, seed=9)[0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "verbose", "shown"),
    [(Terminal, None, True), (Terminal, False, False), (io.StringIO, None, False), (io.StringIO, True, True)],
)
def test_a_bar_is_shown_in_a_terminal_or_on_request(monkeypatch, stream, verbose, shown):
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    run = federation()
    history = run.fit(3, validation=TEST, test=TEST, verbose=verbose)
    text = written.getvalue()
    assert (text != "") == shown
    if shown:
        last = text.rstrip().rpartition("\r")[2]
        assert "9/9" in last
        assert f"validation_mse={history.last['validation_mse']:.4g}, best={run.best[0]:.4g}" in last


def test_a_bar_is_shown_in_a_notebook_and_closed_after_an_error(monkeypatch, capsys):
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "tqdm.auto", sys.modules.get("tqdm.auto") or pytest.importorskip("tqdm.auto"))

    def fail(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation().fit(3, on_round=fail)
    assert "0/9" in capsys.readouterr().err
    kernel.config.clear()  # a shell in a terminal whose stderr is a file
    federation().fit(1)
    assert capsys.readouterr().err == ""


def test_a_value_that_is_not_a_bool_is_refused():
    with pytest.raises(BadArgument, match="verbose must be True or False"):
        federation().fit(1, verbose="no")
