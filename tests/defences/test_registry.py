"""One record for each defence: it says enough to build it, to send its messages and to attack it."""

import subprocess
import sys

import pytest
import torch
from tests.defences.runs import federation
from tests.oracle import flat

from fedveil.defences import Defence, Plain, Private, registry
from fedveil.defences.registry import (
    BUILT_IN,
    INCLUDED,
    Record,
    build,
    build_for_client,
    find,
    find_codec,
    find_record,
    names,
    refers_to_code,
)
from fedveil.errors import BadArgument
from fedveil.lookup import import_object
from fedveil.runs.settings import Config, refuse_code

TOY = '''
from fedveil.defences.plain import Plain, PlainClient
from fedveil.defences.registry import Record


class MineClient(PlainClient):
    def __init__(self, factor, model, loss):
        super().__init__(model, loss)
        self.factor = factor

    def upload(self, update, client=0):
        for gradient in update.gradients.values():
            gradient.mul_(self.factor)
        return update


class Mine(Plain):
    """Halves every gradient."""

    def __init__(self, factor=0.5):
        super().__init__()
        self.name, self.factor = "mine", factor

    def client(self, model, example, loss):
        return MineClient(self.factor, model, loss)


RECORD = Record("any", "as configured", "toy_defences:Mine", {"strength": "factor"})
NUMBER = 3
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_defences.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_RECORDS", dict(registry._RECORDS))
    yield
    sys.modules.pop("toy_defences", None)


def first_gradient(defence):
    return flat(federation("mlp", defence, fuse=False).step().gradients)


def test_every_record_names_code_that_is_there_and_keys_that_a_configuration_has():
    assert names()[: len(BUILT_IN)] == ["plain", "veil", "ppdl", "dbcl", "spn"]
    assert names()[: len(INCLUDED)] == list(INCLUDED)
    keys = set(Config().flat())
    for module in ("flwr", "nvflare"):
        pytest.importorskip(module)  # some records name their code
    for record in INCLUDED.values():
        assert record.claim or record.name == "plain"
        assert callable(import_object(record.target, "code", ""))
        assert set(record.settings) <= keys
        assert isinstance(build(record.name), Defence)
        assert find_record(build(record.name)) is record
        assert find_codec(build(record.name))


def test_settings_reach_the_defence_by_their_names_and_others_are_left_out():
    values = {
        "sketch": 3,
        "groups": 7,
        "ppdl": "both",
        "fraction": 0.2,
        "sigma": None,
        "spn_bits": 5,
        "lr": 0.5,
        "x": 1,
    }
    assert build("dbcl", values).q == 3
    assert build("veil", values).noise.groups == 7
    ppdl, spn = build("ppdl", values), build("spn", values)
    assert (ppdl.name, ppdl.fraction, ppdl.sigma) == ("ppdl-both", 0.2, 1e-2)
    assert (spn.bits, spn.lr, spn.weight) == (5, 0.5, 0.1)


def test_settings_of_other_frameworks_have_names_of_their_own():
    for module in ("flwr", "nvflare"):
        pytest.importorskip(module)
    values = {"gamma": 0.5, "tau": 0.25, "message_epsilon": 2.0, "clipping_norm": 3.0, "percentile": 20.0}
    values |= {"sensitivity": 6.0, "message_delta": 1e-6, "noise_multiplier": 1.5, "noise_var": 0.5, "fraction": 0.2}
    settings = {name: vars(build(name, values)) for name in INCLUDED if ":" in name or name == "topk"}
    assert settings == {
        "nvflare:PercentilePrivacy": {"percentile": 20.0, "gamma": 0.5},
        "nvflare:SVTPrivacy": {"fraction": 0.2, "epsilon": 2.0, "noise_var": 0.5, "gamma": 0.5, "tau": 0.25},
        "flower:LocalDpMod": {"clipping_norm": 3.0, "sensitivity": 6.0, "epsilon": 2.0, "delta": 1e-6},
        "flower:fixedclipping_mod": {"clipping_norm": 3.0, "noise_multiplier": 1.5},
        "topk": {"fraction": 0.2},
    }


@pytest.mark.parametrize(("name", "package"), [("nvflare:SVTPrivacy", "nvflare"), ("flower:LocalDpMod", "flwr")])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(name, package):
    code = (
        f"import sys; sys.modules[{package!r}] = None;"  # as if it were not installed
        f"from fedveil.defences.registry import build; build({name!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{name}: the defence needs the package {package}, which is not installed" in done.stderr
    assert f"pip install 'fedveil[{name.partition(':')[0]}]'" in done.stderr


def test_names_with_a_package_are_code_only_if_they_are_not_ours():
    assert [refers_to_code(name) for name in ("veil", "nvflare:SVTPrivacy", "nvflare:Other")] == [False, False, True]
    values = {"defence": "nvflare:SVTPrivacy"}
    refuse_code(values, "file")
    for other in ({"defence": "mine:SVTPrivacy"}, {"model": "nvflare:SVTPrivacy"}):
        with pytest.raises(BadArgument, match="refers to code"):
            refuse_code(other, "file")


@pytest.mark.parametrize("name", ["flower:LocalDpMod", "nvflare:SVTPrivacy"])
def test_a_server_cannot_choose_how_much_noise_protects_clients_from_it(name):
    pytest.importorskip({"flower": "flwr"}.get(name.partition(":")[0], "nvflare"))
    with pytest.raises(BadArgument, match="servers may not ask for"):
        build_for_client(name, {"epsilon": 1e9})


def test_looking_up_a_record_imports_no_package_that_is_not_used():
    code = (
        "import sys; from fedveil.defences import Veil; from fedveil.defences.registry import find_record;"
        "print(find_record(Veil()).name, [n for n in ('flwr', 'nvflare') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "veil []"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(BadArgument, match=r"(?s)there is no defence 'viel'.*use 'veil'; the choices are 'dbcl'"):
        find("viel")


def test_a_class_of_another_package_trains(toy):
    assert find("toy_defences:Mine") == Record("toy_defences:Mine", "Halves every gradient.", "toy_defences:Mine")
    plain = first_gradient("plain")
    assert torch.equal(first_gradient("toy_defences:Mine"), plain / 2)
    assert torch.equal(first_gradient(build("toy_defences:Mine", {"sketch": 3}, {"factor": 0.25})), plain / 4)


@pytest.mark.parametrize("value", ["toy_defences:Mine", "toy_defences:RECORD"])
def test_a_defence_of_an_installed_package_has_a_name(toy, monkeypatch, value):
    installed = {"fedveil.defences": {"mine": value}}
    monkeypatch.setattr(registry, "list_installed", lambda group: installed.get(group, {}))
    assert names()[-1] == "mine"
    record = find("mine")
    assert (record.name, record.target) == ("mine", "toy_defences:Mine")
    assert find_record(build("mine")) is record
    assert torch.equal(first_gradient("mine"), first_gradient("plain") / 2)
    assert build("mine", {"strength": 0.1}).factor == (0.1 if "RECORD" in value else 0.5)
    with pytest.raises(BadArgument, match="there is no defence 'mini'"):
        find("mini")


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("toy_defences:Mine", {"size": 3}, r"(?s)do not match: .*'size'.*Fix: use toy_defences:Mine\(factor\)"),
        ("toy_defences:Other", {}, "module toy_defences has no attribute 'Other'"),
        ("toy_defences:NUMBER", {}, "expected a record, class or function, got int"),
        ("no_such_package:Mine", {}, "cannot import no_such_package"),
        ("collections:OrderedDict", {}, "returned OrderedDict, which is not a defence"),
        ("fedveil.defences:Private", {}, "the settings do not match: missing a required argument: 'inner'"),
    ],
)
def test_what_is_no_defence_is_refused(toy, name, more, text):
    with pytest.raises(BadArgument, match=text):
        build(name, {}, more)


def test_a_subclass_travels_as_its_base_unless_it_has_a_record_of_its_own(toy):
    class Watched(Plain):
        pass

    assert find_record(Watched()).name == "plain"
    assert find_record(Private(Plain(), 1.0, 0.0)) is None
    mine = build("toy_defences:Mine")
    assert find_record(mine).name == "toy_defences:Mine"


def test_the_registry_imports_nothing_heavy():
    code = (
        "import sys, fedveil, fedveil.defences.registry as r; fedveil.__version__; r.names(); r.find('veil');"
        "print([name for name in ('torch', 'scipy', 'flwr', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
