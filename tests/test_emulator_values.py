"""Values where they decide shapes: the same programs with the same data, emulated or not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tests.started import run_python
from tests.values_models import MODELS
from tests.values_training import LOOPS
from tuner.emulator.session import Session
from tuner.space.gpus import get_gpu

ROOT = Path(__file__).parents[1]
pytestmark = [needs_emulator, pytest.mark.proof]  # each starts PyTorch twice


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(get_gpu("a6000")) as one:
        yield one


def run(session: Session | None, *command: str) -> str:
    """What a Python program prints, emulated or, without a session, on the CPU."""
    environment = dict(os.environ) if session is None else session.environment()
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(ROOT)]
    ran = run_python(*command, env={**environment, "PYTHONPATH": os.pathsep.join(paths)})
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def answer(session: Session | None, *command: str) -> Any:
    """The last line that it prints, read as JSON."""
    return json.loads(run(session, *command).splitlines()[-1])


def test_operators_on_integers_return_what_the_cpu_returns(session: Session) -> None:
    program = str(ROOT / "tests" / "values_operators.py")
    on_cpu, emulated = answer(None, program, "cpu"), answer(session, program, "cuda")

    assert len(on_cpu) > 70
    assert {name: emulated[name] for name in on_cpu} == on_cpu


@pytest.fixture(scope="module")
def models_met(session: Session) -> list[dict[str, Any]]:
    """What tiny models meet on the CPU and emulated, by name."""
    program = str(ROOT / "tests" / "values_models.py")
    return [answer(None, program, "cpu"), answer(session, program, "cuda")]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_models_meet_the_sizes_and_counts_of_the_cpu(
    models_met: list[dict[str, Any]], model: str
) -> None:
    on_cpu, emulated = models_met
    assert emulated[model] == on_cpu[model]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_training_meets_the_sizes_and_counts_of_the_cpu(
    session: Session, loop: str, tmp_path: Path
) -> None:
    program = str(ROOT / "tests" / "values_training.py")
    met = []
    for device, owner in (("cpu", None), ("cuda", session)):
        file = tmp_path / f"{device}.json"
        run(owner, program, loop, device, str(file))
        met.append(json.loads(file.read_text(encoding="utf-8")))

    assert met[0]
    assert met[1] == met[0]


MADE_UP = """
import json, threading, torch
device, found = "cuda", {}
big = torch.randn(2000, 3000, device=device)
found["finite"] = [
    torch.isfinite(x).all().item() and abs(x.item()) < 1e6
    for x in (big.sum(), big.mean(), big.norm(), big.std(), big.max(), (big @ big.T).mean())
]
found["nan"] = [bool(big.isnan().any()), bool(big.isinf().any()), bool(torch.isfinite(big).all())]
found["most"] = int((big > 0).sum()) == big.numel()
found["selected"] = big[big > 0].numel() == int((big > 0).sum())
found["equal"] = [int((big == big).sum()) == big.numel(), int((big == big * 2).sum())]
found["undefined"] = torch.log(-torch.ones(4, device=device)).isfinite().all().item()
found["infinite"] = torch.full((4, 4), float("-inf"), device=device).triu(1).isinf().sum().item()
found["to_host"] = bool(torch.isfinite((torch.zeros(9, device=device) / 0).cpu()).all())

covariance = torch.randn(4000, 4, 4, device=device)
found["solved"] = torch.linalg.cholesky_ex(covariance).info.any().item()
scores = torch.randn(4096, 100, device=device) @ torch.randn(100, 64, device=device)
weights, chosen = scores.softmax(-1).topk(8)
load = torch.bincount(chosen.flatten(), minlength=64)
found["load"] = [int(load.min()), int(load.max())]
found["distinct"] = bool((torch.nn.functional.one_hot(chosen, 64).sum(1) <= 1).all())
found["argmax"] = torch.unique(scores.argmax(-1)).numel()
drawn = torch.multinomial(scores.softmax(-1), 2)
found["multinomial"] = [int(drawn.min()) >= 0, int(drawn.max()) < 64]
torch.cuda.manual_seed(3)
first = torch.randperm(1000, device=device), torch.randint(9, (50,), device=device)
torch.cuda.manual_seed(3)
again = torch.randperm(1000, device=device), torch.randint(9, (50,), device=device)
found["seeded"] = [torch.equal(a, b) for a, b in zip(first, again)]
found["permutation"] = torch.equal(first[0].sort()[0].cpu(), torch.arange(1000))
state = torch.get_rng_state()
torch.rand(3, device=device), torch.nn.functional.dropout(torch.ones(9, device=device))
found["cpu_generator"] = torch.equal(state, torch.get_rng_state())
def work():
    found["thread"] = torch.arange(5, device=device).sum().item()
worker = threading.Thread(target=work)
worker.start(); worker.join()
found["printed"] = repr(torch.arange(3, device=device))
print(json.dumps(found))
"""


def test_what_nobody_computed_is_finite_spread_out_and_seeded(session: Session) -> None:
    found = answer(session, "-c", MADE_UP)

    assert found["finite"] == [True] * 6
    assert found["solved"] is False
    assert found["nan"] == [False, False, True]
    assert found["most"]
    assert found["selected"]
    assert found["equal"] == [True, 0]
    assert found["undefined"]
    assert found["infinite"] == 6
    assert found["to_host"]
    assert found["load"] == [512, 512]
    assert found["distinct"]
    assert found["argmax"] == 64
    assert found["multinomial"] == [True, True]
    assert found["seeded"] == [True, True]
    assert found["permutation"]
    assert found["cpu_generator"]
    assert found["thread"] == 10
    assert found["printed"] == "tensor([0, 1, 2], device='cuda:0')"


SIZES = """
import json, torch
device, found = "cuda", {}
mode = torch.utils._python_dispatch._get_current_dispatch_mode()
rows = mode.values.unknowns.rows

x = torch.zeros(64, 512, device=device)
x[:, :100] = 1
found["ones"] = x[x > 0].numel()
large = torch.full((5000, 5000), 2.0, device=device).to(torch.bfloat16) * 2
found["constants"] = [large[large == 4].numel(), large[large > 4].numel(), large[0, 0].item()]
scattered = torch.zeros(300, 300, device=device).scatter_(
    1, torch.arange(300, device=device)[:, None], 1.0)
found["scattered"] = [scattered.nonzero().shape[0], int((scattered != 0).cumsum(0)[-1].sum())]
state = torch.zeros(3000, 3000, device=device)
state.lerp_(torch.randn(3000, 3000, device=device), 0.1)
found["said of known"] = rows()
found["no constant"] = state[state > 0].numel()  # line 18

floats = torch.softmax(torch.randn(4096, 1000, device=device), -1)
found["at most"] = floats[floats > 0.5].numel()  # line 21
few = floats.sum(-1)
found["few"] = few[few > 2].numel()  # line 23
loads = torch.bincount(floats.topk(2)[1].flatten(), minlength=1000)  # line 24
rest = floats[~(floats > 0.5)].numel()  # line 25
chosen = floats[(floats > 0.5).cpu()].numel()  # line 26
found["read"] = int((floats > 0.5).sum())  # line 27
found["printed"] = len(f"{floats} {floats.sum()!r} {few[:9]}")  # decides nothing
names = "operator", "line", "kind", "decides_shape"
found["rows"] = [[row[name] for name in names] for row in rows()]
print(json.dumps(found))
"""


def test_sizes_of_known_values_are_right_and_others_are_listed_with_their_line(
    session: Session, tmp_path: Path
) -> None:
    program = tmp_path / "sizes.py"
    program.write_text(SIZES, encoding="utf-8")
    found = answer(session, str(program))

    assert found["ones"] == 6400
    assert found["constants"] == [5000 * 5000, 0, 4.0]
    assert found["scattered"] == [300, 300]
    assert found["said of known"] == []
    assert found["no constant"] == 3000 * 3000
    assert found["at most"] == 4096 * 1000
    assert found["few"] == 4096
    said = [[int(line.rpartition(":")[2]), name, *rest] for name, line, *rest in found["rows"]]
    assert said == [
        [18, "aten::index", "at most", True],
        [21, "aten::index", "at most", True],
        [23, "aten::index", "at most", True],
        [24, "aten::bincount", "assumed", True],
        [25, "aten::index", "made up", True],
        [26, "copy to the host", "at most", False],
        [26, "aten::index", "at most", True],
        [27, "item", "at most", False],
    ]


READ_INSIDE = """
import ctypes, json, os, re, torch
names = os.listdir(os.environ["TUNER_EMULATOR_LIBRARIES"])
runtime = ctypes.CDLL(next(name for name in names if re.fullmatch("libcudart.so.[0-9]+", name)))
driver = ctypes.CDLL("libcuda.so.1")
host = ctypes.c_int(7)
size = ctypes.c_size_t(4)
counts = torch.arange(9, device="cuda")

def failed(call):
    try:
        call()
    except RuntimeError:
        return True
    return False

said = [torch.isin(counts.repeat(50), counts.repeat(9)).all().item()]  # reads what is computed
said.append(torch._foreach_copy_([torch.zeros(2)], [torch.ones(2, device="cuda")])[0].tolist())
said.append(failed(lambda: torch.histc(torch.randn(5000, device="cuda"))))  # reads its bounds
address = ctypes.c_void_p(counts.data_ptr())
to_host = 2
said.append(runtime.cudaMemcpy(ctypes.byref(host), address, size, to_host))
said.append(driver.cuMemcpyDtoH_v2(ctypes.byref(host), address, size))
said.append(host.value)
print(json.dumps(said))
"""


def test_what_compiled_code_reads_back_is_refused_by_name_whoever_copies(session: Session) -> None:
    not_supported = 801
    list(session.events())
    found = answer(session, "-c", READ_INSIDE)
    refused = [event["operator"] for event in session.events() if event["event"] == "unsupported"]

    assert found == [True, [1.0, 1.0], True, not_supported, not_supported, 7]
    assert refused == ["aten::histc", *["compiled code called by <module>"] * 2]


SUPPRESSED = """
import json, torch, torchvision
found = []
for count in (100, 4000):
    boxes = torch.rand(count, 4, device="cuda")
    boxes[:, 2:] += boxes[:, :2]
    scores = torch.rand(count, device="cuda")
    kept = torchvision.ops.nms(boxes, scores, 0.5)
    found.append([kept.numel(), torch.cuda.memory_allocated()])
    if count == 100:
        found.append(kept.cpu().equal(torchvision.ops.nms(boxes.cpu(), scores.cpu(), 0.5)))
print(json.dumps(found))
"""


@pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")
def test_boxes_are_suppressed_or_all_are_kept(session: Session) -> None:
    few, same, many = answer(session, "-c", SUPPRESSED)

    assert 1 <= few[0] < 100
    assert same is True
    assert many[0] == 4000
    assert many[1] < 2**20


MEMORY = """
import json, resource, torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
torch.zeros(1, device="cuda"); (torch.zeros(8, 8, device="cuda") > 0).sum().item()
before = resident()
weights = [torch.empty(1 << 28, dtype=torch.bfloat16) for _ in range(4)]
on_device = [w.to("cuda") for w in weights]
converted = [w.to("cuda", torch.float16) for w in weights]
quantised = torch.empty(1 << 30, dtype=torch.uint8).to("cuda")
copied = quantised.clone(), torch.zeros(1 << 28, device="cuda").normal_()
ids = torch.arange(1 << 20).to("cuda")
print(json.dumps([(resident() - before) / 2**20, int(ids[-1]), torch.cuda.memory_allocated()]))
"""


def test_weights_take_no_host_memory_and_token_ids_arrive(session: Session) -> None:
    grown_mib, last, allocated = answer(session, "-c", MEMORY)

    assert allocated > 7 * 2**30
    assert last == (1 << 20) - 1
    assert grown_mib < 200


STEP = """
import json, sys, torch
if sys.argv[1] == "without":
    torch._C._pop_torch_dispatch_stack(None)
from transformers import LlamaConfig, LlamaForCausalLM
from peft import LoraConfig, get_peft_model
config = LlamaConfig(vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=3,
                     num_attention_heads=8, num_key_value_heads=4)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
ids = torch.randint(32000, (2, 512), device="cuda").clamp(0, 31999)
# A whole mask, so that nothing is decided by values, which nobody has without the mode.
mask = torch.zeros(2, 1, 512, 512, device="cuda", dtype=torch.bfloat16)
found = []
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    found.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
print(json.dumps(found))
"""


REPLACED = """
import torch

def replaced(make):
    def made(*args, **kwargs):
        kwargs["device"] = kwargs.get("device") or "cuda"
        tensor = make(*args, **kwargs)
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return made

for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "randn"):
    setattr(torch, name, replaced(getattr(torch, name)))
layer = torch.nn.Linear(64, 64, device="cuda")
sums = layer(torch.ones(2, 64)).softmax(-1).float().sum(-1) > 0
print(torch.ones(64).sum().item(), torch.arange(5).tolist(), sums.tolist())
"""


def test_constructors_that_a_program_replaces_do_not_reach_the_emulator(session: Session) -> None:
    """DeepSpeed's `zero.Init` makes every tensor on the device, and in its own type."""
    assert run(session, "-c", REPLACED).strip() == "64.0 [0, 1, 2, 3, 4] [True, True]"


def test_values_take_no_device_memory(session: Session) -> None:
    assert answer(session, "-c", STEP, "with") == answer(session, "-c", STEP, "without")


COMPILED = """
import json, torch
device, found = "cuda", {}

@torch.compile
def counts(ids, labels):
    kept = (ids > 10) & (labels != -100)
    return kept, kept.sum(), kept.cumsum(-1)

for rows in (4, 5, 6):  # from the second on with symbols for sizes
    ids = torch.arange(rows * 8).view(rows, 8) % 23
    got, want = counts(ids.to(device), ids.to(device)), (ids > 10).cumsum(-1)
    found[rows] = [int(got[1]) == int((ids > 10).sum()), torch.equal(got[2].cpu(), want)]

@torch.compile
def selected(x, ids):
    mask = ids > 10
    chosen = x[mask]
    return chosen * 2, mask.sum()

ids = torch.arange(128).to(device)
chosen, count = selected(torch.randn(128, 8, device=device), ids)
found["selected"] = [chosen.shape[0], int(count)]

@torch.compile
def route(x, w):
    weights, chosen = (x @ w).softmax(-1).topk(2, -1)
    load = torch.zeros(8, device=device, dtype=torch.long)
    return load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))

wide = torch.randn(16, 8, device=device)
found["load"] = route(torch.randn(600, 16, device=device), wide).tolist()
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).to(device))
loss = model(torch.randn(256, 64, device=device)).square().mean()
loss.backward()
found["loss"] = 0 < loss.item() < 10
print(json.dumps(found))
"""


def test_compiled_graphs_return_the_integers_that_their_kernels_would(session: Session) -> None:
    found = answer(session, "-c", COMPILED)

    for rows in ("4", "5", "6"):
        assert found[rows] == [True, True]
    assert found["selected"] == [117, 117]
    assert found["load"] == [150] * 8
    assert found["loss"]
