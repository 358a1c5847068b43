"""`fedveil data`, in process, on what it prints."""

from fedveil.cli import main


def test_data_sets_are_listed_with_their_state(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert main(["data", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["digits"].split()[1] == "embedded"
    assert lines["bank"].split()[1] == "missing"


def test_what_cannot_be_downloaded_says_where_to_get_it(capsys, tmp_path):
    assert main(["data", "get", "lesion", "--to", str(tmp_path)]) == 2
    assert "lesion" in capsys.readouterr().err


def test_a_download_without_a_name_is_refused(capsys):
    assert main(["data", "get"]) == 2
    assert "no data set is named" in capsys.readouterr().err
