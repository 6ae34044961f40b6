"""One process that stands for all ranks takes what each of them takes, and says what it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from emulating import needs_emulator

from tuner.app.cli.main import cli
from tuner.app.estimate import one_configuration
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.core.units import GIB
from tuner.cost.library_memory import nccl_bytes
from tuner.cost.parallel import Links, _Exchange, waited_s
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.space.models.hollow import write_hollow

pytestmark = needs_emulator

PROGRAMS = Path(__file__).parent / "shared_cases"
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""124 million parameters in layers wide enough that what is gathered, kept and freed shows."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "bf16")

ALIKE = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

def train(rank, ranks):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29817", rank=rank, world_size=ranks,
        device_id=torch.device("cuda", rank))
    assert (dist.get_rank(), dist.get_world_size()) == (0, ranks)
    found = [None] * ranks
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}] * ranks
    one = torch.ones(1, dtype=torch.long, device="cuda")
    dist.all_reduce(one)
    assert one.item() == ranks
    got = torch.empty(ranks, dtype=torch.long, device="cuda")
    dist.all_to_all_single(got, torch.arange(ranks, device="cuda") + 5)
    assert got.tolist() == [5] * ranks
    on_host = dist.new_group(backend="gloo")
    dist.barrier(on_host)
    dist.all_gather_object(found, rank, group=on_host)
    assert found == [0] * ranks
    mesh = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("a", "b"))
    assert mesh["a"].size() == ranks // 2 and mesh["b"].get_local_rank() == 0
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    print("all alike", flush=True)
    dist.recv(torch.empty(3, device="cuda"), src=1)

if __name__ == "__main__":
    mp.spawn(train, args=(4,), nprocs=4)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    write_hollow(str(folder / "config"), folder / "hollow")
    return folder / "hollow"


def run(command: tuple[Any, ...], tmp_path: Path, *, gpus: int, all_ranks: bool) -> Emulation:
    machine = Machine(get_gpu("h100_sxm"), gpus, all_ranks=all_ranks)
    with (tmp_path / "output").open("w+") as output:
        found = machine.run([str(word) for word in command], steps=2, output=output)
        output.seek(0)
        assert found.ended == "steps", output.read()
    return found


@pytest.mark.proof
def test_qlora_under_fsdp_takes_the_same_of_one_process_and_of_two(
    tmp_path: Path, model: Path
) -> None:
    launch = (*ACCELERATE, "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2")
    wrap = ("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    command = (*launch, *wrap, PROGRAMS / "fsdp_qlora.py", model, "256")
    one = run(command, tmp_path, gpus=2, all_ranks=False)
    both = run(command, tmp_path, gpus=2, all_ranks=True)
    assert (one.stands_for, both.stands_for) == (2, 1)
    assert (len(one.devices), len(both.devices)) == (1, 2)
    for name in ("loaded_bytes", "peak_allocated_bytes", "peak_reserved_bytes"):
        sizes = getattr(one.devices[0], name), getattr(both.devices[0], name)
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02), name
    assert one.devices[0].breakdown == pytest.approx(both.devices[0].breakdown, rel=0.02)
    assert one.devices[0].breakdown["adapters"] > 0
    assert one.time is not None
    assert both.time is not None
    assert one.time.step_s == pytest.approx(both.time.step_s, rel=0.02)


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(0)
blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(6)]
model = nn.Sequential(*blocks).cuda()
for block in blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.proof
def test_parts_of_whole_and_sharded_parameters_have_their_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED, encoding="utf-8")
    command = (*TORCHRUN, "--nproc-per-node", "2", tmp_path / "train.py")
    (device,) = run(command, tmp_path, gpus=2, all_ranks=False).devices
    block = 4 * 2 * (1024 * 1024 + 1024)
    assert device.trainable_params == 6 * block // 4
    assert device.peak_phase == "backward"
    parts = device.breakdown
    # Shards, two whole blocks, the gradients of two, and what is sent of them.
    assert parts["weights"] == pytest.approx(3 * block + 2 * block, rel=0.01)
    assert parts["gradients"] == pytest.approx(4 * block, rel=0.01)
    assert parts["optimizer_state"] == pytest.approx(2 * 3 * block, rel=0.01)
    assert "adapters" not in parts
    assert sum(parts.values()) == device.peak_allocated_bytes

    # Of a step of two micro-batches the first keeps its gradients whole; one block's are reduced.
    step = "    model(torch.randn(64, 1024, device="
    twice = f"    model.set_requires_gradient_sync(step % 2)\n{step}"
    once = "    if step % 2 == 0: continue\n    optimizer.step()"
    program = SHARDED.replace(step, twice).replace("    optimizer.step()", once)
    (tmp_path / "train.py").write_text(program.replace("range(3)", "range(6)"), encoding="utf-8")
    (device,) = run(command, tmp_path, gpus=2, all_ranks=False).devices
    assert device.breakdown["unsharded_gradients"] == pytest.approx(5 * block, rel=0.01)


TRAINER = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
rows = [list(range(256))] * 16
data = Dataset.from_dict({"input_ids": rows, "labels": rows})
settings = {"per_device_train_batch_size": 2, "max_steps": 3, "bf16": True, "save_strategy": "no"}
arguments = TrainingArguments("out", report_to=[], **settings)
Trainer(model, arguments, train_dataset=data).train()
"""


def test_trainer_under_ddp_takes_what_is_predicted(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer lets DDP look for unused parameters, which needs pinned memory of the host."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    command = (*TORCHRUN, "--nproc-per-node", "2", tmp_path / "train.py", model)
    (device,) = run(command, tmp_path, gpus=2, all_ranks=False).devices
    settings: dict[str, Any] = {"gpus_per_trial": 2, "lora_rank": 0, "precision": "bf16"}
    settings |= {"mixed_precision": "bf16", "micro_batch": 2, "grad_accum": 1, "max_length": 256}
    settings |= {"gradient_checkpointing": False, "optimizer": "adamw_torch_fused"}
    space, asked = one_configuration(None, str(model), settings)
    subject = Subject(space.workload, space.predicted_model())
    prediction = predict(subject, asked, get_gpu("h100_sxm"))
    predicted = prediction.memory
    assert device.trainable_params == prediction.trainable_params
    weights_bytes = 2 * prediction.trainable_params
    for name in ("weights", "gradient_buckets"):
        assert device.breakdown[name] == pytest.approx(weights_bytes, rel=0.01), name
    assert device.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.01)
    assert device.device_bytes == pytest.approx(predicted.device_bytes, rel=0.02)
    buffers = device.device_bytes - device.peak_reserved_bytes - get_gpu("h100_sxm").context_bytes
    assert buffers == nccl_bytes(get_gpu("h100_sxm"), 2)


@pytest.mark.proof
def test_a_tensor_parallel_rank_loads_its_shard(tmp_path: Path, model: Path) -> None:
    ranks = 4
    command = (*TORCHRUN, "--nproc-per-node", ranks, PROGRAMS / "tensor_parallel.py", model, "128")
    found = run(command, tmp_path, gpus=ranks, all_ranks=False)
    assert found.stands_for == ranks
    wide, inner, words = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    keys = wide * MODEL["num_key_value_heads"] // MODEL["num_attention_heads"]
    layer = (2 * wide * (wide + keys) + 3 * wide * inner) / ranks + 2 * wide  # norms are whole
    expected = MODEL["num_hidden_layers"] * layer + wide + 2 * words * wide / ranks
    (device,) = found.devices
    assert device.loaded_bytes == pytest.approx(2 * expected, rel=0.01)


def test_what_only_another_rank_knows_is_an_error_that_says_how_to_run_it(tmp_path: Path) -> None:
    program = tmp_path / "alike.py"
    program.write_text(ALIKE, encoding="utf-8")
    with (tmp_path / "output").open("w+") as output:
        machine = Machine(get_gpu("t4"), count=4)
        found = machine.run([sys.executable, str(program)], steps=0, output=output)
        output.seek(0)
        text = output.read()
    assert "all alike" in text, text
    assert "rank 1 is not there" in text
    assert "--all-ranks" in text
    assert (found.stands_for, found.steps, found.exit_status) == (4, 1, 1)


def test_the_command_says_for_whom_it_stands(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "print('I am', dist.get_rank(), 'of', dist.get_world_size(), flush=True)\n"
        "weight = torch.ones(4, device='cuda', requires_grad=True)\n"
        "weight.sum().backward()\n"
        "torch.optim.SGD([weight]).step()\n",
        encoding="utf-8",
    )
    launcher = tmp_path / "launch.sh"
    words = " ".join(TORCHRUN)
    launcher.write_text(f"#!/bin/sh\nexec {words} --nproc-per-node 2 {program}\n")
    launcher.chmod(0o755)
    asked = ["emulate", "--gpu", "t4", "--gpus", "2", "--steps", "1", "--", os.fspath(launcher)]
    said = CliRunner().invoke(cli, asked)
    assert said.exit_code == 0, said.output
    assert "rank 0, which stands for all 2; --all-ranks runs each" in " ".join(said.output.split())


SUMS = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
assert os.environ["GROUP_WORLD_SIZE"] == "2"
gradients = torch.empty(1 << 28, device="cuda")
for _ in range(3):
    model(torch.ones(8, 8, device="cuda")).sum().backward()
    dist.all_reduce(gradients)
    optimizer.step()
"""


@pytest.mark.proof
def test_a_launcher_of_two_machines_starts_one_and_what_ranks_send_crosses_the_network(
    tmp_path: Path,
) -> None:
    """`tuner emulate` reads how many machines there are; no other launcher is waited for."""
    (tmp_path / "train.py").write_text(SUMS, encoding="utf-8")
    start = ("torchrun", "--nnodes", "2", "--node-rank", "0", "--master-addr", "first")
    words = [*start, "--nproc-per-node", "8", str(tmp_path / "train.py")]
    words[0] = str(Path(sys.executable).with_name("torchrun"))
    asked = [sys.executable, "-m", "tuner", "emulate", "--gpu", "h100_sxm", "--json", "--", *words]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert said.stdout, said.stderr
    found = json.loads(said.stdout)
    gpu, ranks = get_gpu("h100_sxm"), Parallelism(16, machines=2)
    links = Links.of(gpu, gpu.link_bytes_per_s or 0.0, ranks)
    assert (found["ended"], found["stands_for"]) == ("steps", 16)
    assert found["time"]["breakdown_s"]["exchange"] == pytest.approx(
        waited_s(_Exchange(buckets=(GIB,)), ranks, links, 0.0)
    )
