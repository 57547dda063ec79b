"""Two CPU processes, data parallel and fully sharded, take the step that one process takes."""

import subprocess
import sys

import torch
from conftest import random_ids
from oracles import SIGMA

from hf_poslsh import patch_model, set_step
from hf_poslsh.testing import tiny_model

_STEP = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from hf_poslsh import patch_model, set_step
from hf_poslsh.testing import FAMILIES, tiny_model

rank, folder, sigma = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
ids = torch.load(f"{folder}/ids.pt")
answers = {}
for family, kind in ((family, kind) for family in FAMILIES for kind in ("ddp", "fsdp")):
    model = patch_model(tiny_model(family), sigma=sigma, num_samples=6, resample="step").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "fsdp":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    set_step(wrapped, 5)
    wrapped(ids[rank : rank + 1], labels=ids[rank : rank + 1], use_cache=False).loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    answers[family, kind] = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
if rank == 0:
    torch.save(answers, f"{folder}/grads.pt")
dist.destroy_process_group()
"""


def test_two_processes_equal_one(tmp_path):
    ids = random_ids(2, 24)
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [str(tmp_path), repr(SIGMA)]
    workers = [
        subprocess.Popen([sys.executable, "-c", _STEP, str(rank), *arguments], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=240)[1] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), errors
    answers = torch.load(tmp_path / "grads.pt")
    assert len(answers) == 6
    for (family, _), grads in answers.items():
        model = patch_model(tiny_model(family), sigma=SIGMA, num_samples=6, resample="step").train()
        set_step(model, 5)
        model(ids, labels=ids, use_cache=False).loss.backward()
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(grad, parameter.grad, atol=2e-5, rtol=1e-4)
