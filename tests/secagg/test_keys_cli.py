"""`fedveil keys`: in process, on what it prints and what it leaves behind."""

import re
import stat
import subprocess
import sys

import pytest

from fedveil.cli import main
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.secagg import Identity, Policy, Roster


def test_a_new_key_is_private_and_its_line_goes_into_a_roster(tmp_path, capsys):
    assert main(["keys", "new", "alice", "--out", str(tmp_path / "keys")]) == 0
    line = capsys.readouterr().out
    assert re.fullmatch(r"alice [0-9a-f]{64}\n", line)
    path = tmp_path / "keys" / "alice.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["keys", "show", str(path)]) == 0
    assert capsys.readouterr().out == line
    (tmp_path / "roster").write_text("# ours\n\n" + line)
    assert Roster.read(tmp_path / "roster").public_key("alice") == Identity.load(path).public()
    before = path.read_bytes()
    assert main(["keys", "new", "alice", "--out", str(tmp_path / "keys")]) == 2
    captured = capsys.readouterr()
    assert "the file already exists and will not be overwritten" in captured.err
    assert path.read_bytes() == before
    private = re.search(rb'private = "(\w{64})"', before)[1].decode()
    assert private not in line + captured.out + captured.err


@pytest.mark.parametrize("name", ["../alice", "a b", "", ".hidden", "a" * 65, "a/b"])
def test_names_that_are_none_are_refused(tmp_path, capsys, name):
    assert main(["keys", "new", name, "--out", str(tmp_path)]) == 2
    assert "a member's name must have 1 to 64 letters" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_of_keys_imports_neither_torch_nor_cryptography():
    code = (
        "import sys; from fedveil.cli import main; status = main(['keys', '--help']);"
        "sys.exit(status or sorted({'torch', 'cryptography'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedveil keys new alice --out keys" in done.stdout


def test_a_policy_names_the_server_that_a_client_answers(tmp_path, capsys):
    main(["keys", "new", "alice", "--out", str(tmp_path)])
    main(["keys", "new", "server", "--out", str(tmp_path)])
    line = capsys.readouterr().out.splitlines()[-1]
    key = str(tmp_path / "alice.key")
    for server in (line, line.split()[1]):
        (tmp_path / "alice.policy").unlink(missing_ok=True)
        assert main(["keys", "policy", key, "--server", server]) == 0
        assert Policy.read(tmp_path / "alice.policy") == Policy(server=Identity.load(tmp_path / "server.key").public())
    assert "alice answers only the server" in capsys.readouterr().out
    assert main(["keys", "policy", key, "--server", line]) == 2
    assert "already exists and will not be overwritten" in capsys.readouterr().err
    for wrong in ("", "abc", "server"):
        assert main(["keys", "policy", key, "--server", wrong]) == 2
        assert "64 hexadecimal digits" in capsys.readouterr().err


def test_the_ledger_of_a_client_is_printed(tmp_path, capsys):
    main(["keys", "new", "alice", "--out", str(tmp_path)])
    key, server = tmp_path / "alice.key", capsys.readouterr().out.split()[-1]
    main(["keys", "policy", str(key), "--server", server])
    assert main(["keys", "ledger", str(key)]) == 2
    assert "no [privacy] table" in capsys.readouterr().err
    policy = key.with_suffix(".policy")
    policy.write_text(policy.read_text() + '[privacy]\ndataset = "d"\nrecords = 9\nepsilon = 3\n')
    limits = Policy.read(policy).privacy
    PrivacyLedger(limits.ledger, limits.epsilon, limits.delta).charge(2.0, 1.0)
    assert main(["keys", "ledger", str(key)]) == 0
    assert capsys.readouterr().out == f"d: epsilon {epsilon(1, 2.0, 1e-5):.3g} of 3 (delta 1e-05), rounds: 1\n"
