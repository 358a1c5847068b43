"""A broadcast belongs to the process that holds it: a fork gets a copy, and neither side sees the other's next one."""

import os
import subprocess
import sys

import pytest

START = """
import os
import torch
from fedveil import Veil, analyse
from fedveil.models import mlp

torch.set_num_threads(1)
torch.manual_seed(0)
model = mlp(300, 10, hidden=300)
plan = analyse(model, torch.zeros(2, 300))

session = Veil().start(plan)

def broadcast():
    perturbation = session.perturb(model)
    return perturbation, perturbation.broadcast

held_secret, held = broadcast()
before = {name: tensor.clone() for name, tensor in held.parameters.items()}

def same():
    return all(torch.equal(tensor, before[name]) for name, tensor in held.parameters.items())

reader, writer = os.pipe()
child = os.fork()
"""
PARENT_GOES_ON = """
if child:
    held_secret.release(reuse=True)
    for _ in range(4):
        broadcast()[0].release(reuse=True)
    os.write(writer, b"x")
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.read(reader, 1)
os._exit(0 if same() else 3)
"""
CHILD_GOES_ON = """
if not child:
    for tensor in held.parameters.values():
        tensor.zero_()
    held_secret.release(reuse=True)
    for _ in range(4):
        broadcast()[0].release(reuse=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
raise SystemExit(0 if same() else 3)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("rest", [PARENT_GOES_ON, CHILD_GOES_ON], ids=["the parent's", "the child's"])
def test_a_broadcast_does_not_change_with_work_in_the_other_process(rest):
    done = subprocess.run([sys.executable, "-c", START + rest], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
