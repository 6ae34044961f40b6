"""What operators of an emulated program cost: works, counts, the virtual clock, the step time.

Operators run on tensors that only say that they are on a GPU; the device is a list of launches.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulating import needs_emulator
from tests.started import run_python
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.core.units import GIB, MIB
from tuner.cost.parallel import Links, _Exchange, waited_s
from tuner.cost.speed.roofline import RECOMPUTED, TRAINED, Efficiency, Roofline
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator.inside.core import LIBRARY, KernelLaunch
from tuner.emulator.inside.pricing import Pricer
from tuner.emulator.inside.process import when_imported
from tuner.emulator.inside.triton_launches import describe_kernel
from tuner.emulator.rates import EXCHANGE, gpu_to_dict, pcie_bytes_per_s
from tuner.emulator.session import Session
from tuner.emulator.step_time import step_time
from tuner.predict.tracing.recorder import Recorder
from tuner.space.gpus import get_gpu

A100 = get_gpu("a100-40gb")
KERNEL_S, LAUNCH_S = Efficiency().kernel_s, Efficiency().launch_s
STREAMED = Efficiency().bandwidth["elementwise"]


class Device:
    """`Core` with a clock that adds up, and launches that a test makes."""

    def __init__(self) -> None:
        self.host_ns = self.device_ns = 0.0
        self.made: list[KernelLaunch] = []

    def work(self, host_ns: float, device_ns: float) -> None:
        self.host_ns += host_ns
        self.device_ns += device_ns

    def launch(self, name: str, grid=(1, 1, 1), block=(1, 1, 1)) -> None:
        self.made.append(KernelLaunch(name, grid, block))

    def launch_count(self) -> int:
        return len(self.made)

    def launches(self, first: int, most: int) -> list[KernelLaunch]:
        return self.made[first : first + most]

    def device_now_ns(self) -> float:
        return self.device_ns


class Shows(TorchDispatchMode):
    """Shows operators to a pricer, as the mode of an emulated process does."""

    def __init__(self, pricer: Pricer) -> None:
        super().__init__()
        self._pricer = pricer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._pricer.before()
        out = func(*args, **(kwargs or {}))
        self._pricer.note(func, args, kwargs or {}, out)
        return out


class Program:
    """A program under a pricer; `run` runs a part of it."""

    def __init__(self) -> None:
        self.device = Device()
        self.pricer = Pricer(A100, self.device)

    def run(self, body, phase: str = "forward", step: int = 0):
        self.pricer.begin(phase, step)
        with FakeTensorMode(), Shows(self.pricer):
            return body()

    def calls(self, *, again: bool = False) -> dict[str, int]:
        """How often each kind of call ran, by its label."""
        found: dict[str, int] = {}
        for (_, _, repeats), counts in self.pricer.counts.items():
            for number, count in counts.items():
                if repeats is again:
                    label = self.pricer.described[number].label
                    found[label] = found.get(label, 0) + count
        return found

    def works(self):
        return [work for d in self.pricer.described for work in d.works]


@pytest.fixture
def program() -> Program:
    return Program()


def gpu_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_an_operator_is_counted_each_time_and_moves_the_clock_by_the_roofline(program):
    def body() -> None:
        x, w = gpu_tensor(256, 512), gpu_tensor(512, 1024)
        for _ in range(3):
            torch.mm(x, w)

    program.run(body)
    assert program.calls() == {"aten::mm(256x512, 512x1024)": 3}
    (work,) = program.works()
    assert (work.kind, work.flops, work.shape) == (
        "matmul",
        2 * 256 * 512 * 1024,
        (1, 256, 1024, 512),
    )
    expected = Roofline().seconds(WorkArrays.of_works([work]), A100, allow_tf32=False)[0, 0]
    assert program.device.device_ns == pytest.approx(3 * expected * 1e9)
    assert program.device.host_ns == pytest.approx(3 * LAUNCH_S * 1e9)


@needs_emulator
def test_the_host_takes_longer_for_what_is_recomputed_and_for_each_updated_parameter(program):
    def body() -> None:
        program.pricer.recomputing = True
        torch.mm(gpu_tensor(256, 512), gpu_tensor(512, 1024))
        program.pricer.recomputing = False

    program.run(body, "backward")
    assert program.device.host_ns == pytest.approx(RECOMPUTED * LAUNCH_S * 1e9)
    program.pricer.begin("optimizer", 0, trained=7)
    assert program.device.host_ns == pytest.approx((RECOMPUTED + 7 * TRAINED) * LAUNCH_S * 1e9)


@needs_emulator  # tensors that say they are on a GPU need PyTorch's CUDA build
def test_views_and_empty_tensors_and_what_runs_on_the_host_cost_nothing(program):
    def body() -> None:
        x = gpu_tensor(4, 8)
        x.view(8, 4).t()[1:].unsqueeze(0).detach()
        torch.ones(3).add(1).mul(2)

    program.run(body)
    assert program.calls() == {}
    assert program.device.device_ns == 0


def test_copies_to_the_host_go_at_the_rate_of_the_slot(program):
    size = 1 << 22

    def body() -> None:
        gpu_tensor(size).cpu()
        gpu_tensor(size).float()

    program.run(body)
    over, here = program.works()
    assert (over.kind, over.bytes_moved) == ("transfer", size * 2)
    assert here.kind == "elementwise"
    assert program.device.device_ns > size * 2 / pcie_bytes_per_s(A100) * 1e9


def test_a_repeated_forward_is_told_from_backward(program):
    def body() -> None:
        x = gpu_tensor(4, 4)
        with torch.no_grad():
            x.mul(2)
        program.pricer.recomputing = True
        x.add(1)
        program.pricer.recomputing = False

    program.run(body, phase="backward")
    assert program.calls() == {"aten::mul(4x4)": 1}
    assert program.calls(again=True) == {"aten::add(4x4)": 1}


@needs_emulator  # tensors that say they are on a GPU need PyTorch's CUDA build
def test_works_are_those_of_a_trace():
    """The same code on tensors without data, noted by the recorder."""

    def body(device: str) -> None:
        x = torch.empty(2, 64, 128, device=device)
        w = torch.empty(256, 128, device=device)
        y = torch.nn.functional.silu(
            torch.nn.functional.linear(x, w, torch.empty(256, device=device))
        )
        torch.log_softmax(y, -1).mean().add_(1)
        torch.ops.aten.silu_backward(y, y)

    emulated = Program()
    emulated.run(lambda: body("cuda"))
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        body("meta")
    traced = {(w.name, w.kind, w.flops, w.tensor_bytes, w.shape) for w in recorder.timeline.works}
    assert {(w.name, w.kind, w.flops, w.tensor_bytes, w.shape) for w in emulated.works()} == traced


def test_products_of_cublas_between_operators_are_priced_by_their_sizes(program):
    def body() -> None:
        x = gpu_tensor(8)
        x.add(1)
        program.device.launch("cublasGemmEx", (64, 32, 16), (1, 14, 68))
        x.add(1)

    program.run(body)
    assert program.calls()["cublasGemmEx(1 x 64 x 32 x 16)"] == 1
    product = next(work for work in program.works() if work.kind == "matmul")
    assert (product.flops, product.dtype) == (2 * 64 * 32 * 16, "bfloat16")


def test_launches_inside_of_an_operator_are_covered_by_it(program):
    def body() -> None:
        x = gpu_tensor(8)
        program.pricer.before()
        program.device.launch("_ZN2at6native4fillEv")
        program.pricer.note(torch.ops.aten.add.Tensor, (x, x), {}, x)

    program.pricer.begin("forward", 0)
    with FakeTensorMode():
        body()
    program.pricer.begin("optimizer", 0)
    assert program.calls() == {"aten::add(8, 8)": 1}


def test_other_kernels_between_operators_are_counted_by_name_and_widen_the_interval(program):
    def body() -> None:
        x = gpu_tensor(8)
        for _ in range(3):
            x.add(1)
            program.device.launch("_ZN4apex4adamEPf")

    program.run(body, phase="optimizer")
    program.pricer.begin("forward", 1)
    found = step_time(program.pricer.snapshot(), A100)
    assert found is not None
    assert found.unpriced == {"apex::adam": 3}
    assert found.unpriced_share == pytest.approx(0.5)
    assert found.step_s == pytest.approx(6 * KERNEL_S)
    low, high = found.interval_s
    without = Program()
    without.run(lambda: gpu_tensor(8).add(1), phase="optimizer")
    plain = step_time(without.pricer.snapshot(), A100)
    assert high / found.step_s == pytest.approx(2 * plain.interval_s[1] / plain.step_s)
    assert low / found.step_s == pytest.approx(plain.interval_s[0] / plain.step_s)


def test_a_kernel_of_triton_is_priced_by_the_tensors_that_it_gets(program):
    def body() -> None:
        x, y = gpu_tensor(1 << 20), gpu_tensor(1 << 20)
        for _ in range(2):
            program.pricer.launched(
                "k", lambda: describe_kernel("swiglu", [x, y], multiplies=False)
            )
            program.device.launch("swiglu")

    program.run(body)
    program.pricer.begin("backward", 0)
    assert program.calls() == {"swiglu(1048576, 1048576)": 2}
    assert program.works()[0].bytes_moved == 2 * 2 * (1 << 20)


def test_a_kernel_of_triton_that_multiplies_is_the_product_of_its_largest_tensors():
    m, k, n = 64, 128, 256
    with FakeTensorMode():
        tensors = [gpu_tensor(m, k), gpu_tensor(k, n), gpu_tensor(m, n), gpu_tensor(8)]
        described = describe_kernel("gemm", tensors, multiplies=True)
    (work,) = described.works
    assert (work.kind, work.flops, work.dtype) == ("matmul", 2 * m * k * n, "bfloat16")
    assert described.source == "product"


def test_kernels_that_are_compared_take_time_and_do_not_count(program):
    def body() -> None:
        x = gpu_tensor(1 << 20)
        with program.pricer.discarding():
            x.add(1)

    program.run(body)
    assert program.device.device_ns > 0
    assert program.calls() == {}


def test_a_graph_counts_whenever_it_is_launched(program):
    x_shape = (1 << 20,)

    def body() -> None:
        x = gpu_tensor(*x_shape)
        program.pricer.capture()
        x.add(1)
        recorded = program.pricer.captured()
        assert (program.calls(), program.device.device_ns) == ({}, 0)
        for _ in range(2):
            program.device.launch("cudaGraphLaunch")
            program.pricer.replayed(recorded)

    program.run(body)
    assert program.calls() == {"aten::add(1048576)": 2}
    assert program.device.host_ns == pytest.approx(2 * LAUNCH_S * 1e9)


def test_a_failed_operator_leaves_nothing_to_the_next_one(program):
    def body() -> None:
        x = gpu_tensor(8)
        program.pricer.before()
        program.device.launch("half_of_an_operator")  # and then it runs out of memory
        x.add(1)

    program.run(body)
    assert program.calls() == {"aten::add(8)": 1}


# -- the step time --------------------------------------------------------------------------------


def trained(steps: int) -> Program:
    """A program that trains; its second step is as long as the others are not."""
    program = Program()
    for step in range(steps):
        rows = 4096 * (1 + (step == 0))

        def forward(rows: int = rows) -> None:
            torch.mm(gpu_tensor(rows, 4096), gpu_tensor(4096, 4096))

        program.run(forward, "forward", step)
        with torch.no_grad():
            program.run(forward, "backward", step)
        program.run(lambda: gpu_tensor(1 << 24).mul_(0.9), "optimizer", step)
    return program


def test_a_step_is_the_median_of_those_after_the_first():
    snapshot = json.loads(json.dumps(trained(4).pricer.snapshot()))
    found = step_time(snapshot, A100)
    assert found.step > 0
    assert found.model_flops == 2 * 2 * 4096**3
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s)
    assert sum(found.phases_s.values()) == pytest.approx(found.step_s)
    assert found.breakdown_s["optimizer"] == pytest.approx(
        2 * 2 * (1 << 24) / (A100.bandwidth_bytes_per_s * STREAMED), rel=0.01
    )
    assert found.most_expensive[0].label == "aten::mm(4096x4096, 4096x4096)"
    assert found.most_expensive[0].calls == 2
    assert found.mfu == pytest.approx(found.model_flops / found.step_s / A100.flops["bf16"])
    assert found.interval_s[0] < found.step_s < found.interval_s[1]


def test_parameters_of_a_later_training_take_none_of_the_host_in_earlier_steps():
    pricer = trained(4).pricer
    assert pricer.snapshot(7)["trained"] == 7
    pricer.begin("optimizer", 4, 100)
    pricer.begin("end", 5, 200)  # the optimizer of a second training, after the steps that count
    assert pricer.snapshot(200)["trained"] == 100


def test_what_can_be_no_step_has_no_time():
    """A count of steps that is off puts the passes and the optimizer into different steps."""
    program = trained(2)
    program.run(lambda: gpu_tensor(1 << 24).mul_(0.9), "optimizer", 2)
    snapshot = json.loads(json.dumps(program.pricer.snapshot()))
    assert step_time(snapshot, A100).step == 1
    counts = snapshot["counts"]
    snapshot["counts"] = [one for one in counts if (one[0] == 2) == (one[1] == "optimizer")]
    assert step_time(snapshot, A100) is None


def test_more_micro_batches_take_the_passes_again_and_the_optimizer_once():
    snapshot = trained(4).pricer.snapshot()
    one, four = (step_time(snapshot, A100, repeats=times) for times in (1, 4))
    for phase in ("forward", "backward"):
        assert four.phases_s[phase] == pytest.approx(4 * one.phases_s[phase])
    assert four.phases_s["optimizer"] == pytest.approx(one.phases_s["optimizer"])
    assert four.step_s == pytest.approx(sum(four.phases_s.values()))
    assert four.model_flops == 4 * one.model_flops


def test_small_kernels_wait_for_the_host():
    program = Program()

    def body() -> None:
        x = gpu_tensor(8)
        for _ in range(100):
            x.add(1)

    program.run(body)
    program.run(lambda: gpu_tensor(8).add(1), "optimizer")
    found = step_time(program.pricer.snapshot(), A100)
    assert found.phases_s["forward"] == pytest.approx(100 * LAUNCH_S)
    assert found.breakdown_s["launch"] == pytest.approx(100 * (LAUNCH_S - KERNEL_S))


# -- what ranks send each other -------------------------------------------------------------------


def reported(*collectives, ranks: int, machines: int) -> dict:
    """A report of one step that launches these collectives in its backward pass."""
    step = [[0, "backward", False, [(n, 1) for n in range(len(collectives))]]]
    sends = [["send", "operator", [list(work)], 1] for work in collectives]
    update = ["sgd", "operator", [["sgd", "elementwise", 0, [8], "float32", None, []]], 1]
    step.append([0, "optimizer", False, [(len(sends), 1)]])
    return {
        "allow_tf32": False,
        "trained": 0,
        "reads_loss": True,
        "ranks": ranks,
        "machines": machines,
        "described": [*sends, update],
        "counts": step,
    }


def collective(name: str, size: int, ranks: int, stride: int = 1):
    return [name, EXCHANGE, 0, [size], "uint8", [ranks, stride, 1, 1], []]


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_send_as_fast_as_in_a_prediction(machines):
    """The sum of a gigabyte over ranks that stand in one machine, or in two."""
    gpu, ranks = get_gpu("h100_sxm"), Parallelism(16, machines=machines)
    report = reported(collective("c10d::allreduce_", GIB, 16), ranks=16, machines=machines)
    found = step_time(report, gpu)
    links = Links.of(gpu, gpu.link_bytes_per_s, ranks)
    expected_s = waited_s(_Exchange(buckets=(GIB,)), ranks, links, backward_s=0.0)
    assert found.breakdown_s["exchange"] == pytest.approx(expected_s)
    rate = {1: gpu.link_bytes_per_s, 2: min(gpu.link_bytes_per_s, 8 * gpu.network_bytes_per_s)}
    assert expected_s == pytest.approx(2 * 15 / 16 * GIB / (0.8 * rate[machines]))


def test_groups_of_ranks_send_by_the_links_between_them():
    """Shards inside of a machine by its link, their sums by the network of both machines."""
    gpu, ranks = get_gpu("h100_sxm"), Parallelism(16, "hsdp", machines=2)
    gathered = collective("c10d::_allgather_base_", GIB, 8)
    summed = collective("c10d::allreduce_", MIB, 2, stride=8)
    found = step_time(reported(gathered, summed, ranks=16, machines=2), gpu)
    links = Links.of(gpu, gpu.link_bytes_per_s, ranks)
    exchange = _Exchange(gathered=GIB, summed=MIB)
    assert found.breakdown_s["exchange"] == pytest.approx(waited_s(exchange, ranks, links, 0.0))


def test_machines_without_a_known_network_are_named():
    gpu = replace(get_gpu("h100_sxm"), network_bytes_per_s=None)
    report = reported(collective("c10d::allreduce_", GIB, 4), ranks=4, machines=2)
    found = step_time(report, gpu)
    assert found.breakdown_s.get("exchange", 0.0) == 0.0
    assert any("without communication between machines" in note for note in found.notes)


def test_a_rank_knows_its_group_and_its_machines(program, monkeypatch, tmp_path):
    """Of a group that is not the whole world, from what a launcher tells each rank."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    init = {"rank": 0, "world_size": 8, "store": torch.distributed.HashStore()}
    torch.distributed.init_process_group("fake", **init)
    try:
        every_other = torch.distributed.new_group([0, 4])

        def body() -> None:
            gradient = gpu_tensor(1 << 20)
            for _ in range(2):
                torch.distributed.all_reduce(gradient, group=every_other)
            torch.distributed.all_reduce(gradient)

        program.run(body, phase="backward")
        program.pricer.begin("optimizer", 0)
        snapshot = program.pricer.snapshot()
    finally:
        torch.distributed.destroy_process_group()
    assert (snapshot["ranks"], snapshot["machines"]) == (8, 4)
    sent = {work.shape[:2]: work for work in program.works() if work.kind == EXCHANGE}
    assert sent.keys() == {(2, 4), (8, 1)}
    assert [count for _, count in snapshot["counts"][0][3]] == [2, 1]


# -- parts ----------------------------------------------------------------------------------------


def test_a_module_is_heard_of_once_whenever_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "heard_of.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    heard = []
    when_imported("heard_of", lambda module: heard.append(module.value))
    assert heard == []
    module = importlib.import_module("heard_of")
    assert heard == [1]
    assert module.__spec__.loader is module.__loader__
    when_imported("heard_of", lambda module: heard.append(2))
    assert heard == [1, 2]
    del sys.modules["heard_of"]


EVENTS = """
import json, os, torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from tuner.emulator.inside.triton_launches import price_operators

(mode,) = [m for m in _get_current_dispatch_mode_stack() if hasattr(m, "observer")]
pricer = price_operators(mode, json.loads(os.environ["TUNER_EMULATOR_SETTINGS"])["gpu"])
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
pricer.begin("forward", 0)
start.record()
for _ in range(10):
    x = x @ x
end.record()
torch.cuda.synchronize()
print(json.dumps([start.elapsed_time(end), pricer.snapshot()]))
"""


REPEATED = """
import json, torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from tuner.emulator.inside.activate import ACTIVE

(mode,) = [m for m in _get_current_dispatch_mode_stack() if hasattr(m, "observer")]
pricer, reached = ACTIVE["pricer"], []
dispatch = type(mode).__torch_dispatch__

def recorded(self, func, *rest):
    reached.append(func._schema.name)
    return dispatch(self, func, *rest)

def doubled(x):
    reached.clear()
    return (x.view(-1, 64) * 2).view(256, 64), list(reached)

type(mode).__torch_dispatch__ = recorded
pricer.begin("forward", 0)
unknown, zeros = (torch.empty(256, 64, device="cuda"), torch.zeros(256, 64, device="cuda"))
doubled(unknown)  # the mode gets to know the operators
(_, first), (_, again), (known, noted) = doubled(unknown), doubled(unknown), doubled(zeros)
is_zero = bool((known == 0).all())
snapshot = pricer.snapshot()
counts = [count for *_, row in snapshot["counts"] for number, count in row
          if snapshot["described"][number][0].startswith("aten::mul")]
print(json.dumps([first, again, noted, is_zero, counts]))
"""


@needs_emulator
def test_a_repeated_operator_needs_no_python_and_is_counted():
    with Session(A100, settings={"rates": gpu_to_dict(A100)}) as session:
        environment = session.environment()
        if not Path(environment["TUNER_EMULATOR_LIBRARIES"], LIBRARY).exists():
            pytest.skip("there is no C++ compiler")
        done = run_python("-c", REPEATED, env=environment)
    assert done.returncode == 0, done.stderr
    first, again, noted, is_zero, counts = json.loads(done.stdout.splitlines()[-1])
    assert first == ["aten::mul"]  # it is judged
    assert again == []
    assert noted == ["aten::mul"]  # a constant has a note: its multiple is known
    assert is_zero
    assert counts == [4]


@needs_emulator
def test_events_of_a_program_give_the_emulated_time():
    with Session(A100, settings={"gpu": gpu_to_dict(A100)}) as session:
        done = run_python("-c", EVENTS, env=session.environment())
    assert done.returncode == 0, done.stderr
    elapsed_ms, snapshot = json.loads(done.stdout.splitlines()[-1])
    (entry,) = [d for d in snapshot["described"] if d[0].startswith("aten::mm")]
    (fields,) = entry[2]
    rate = A100.flops["bf16"] * Efficiency().matmul["bf16"]
    assert elapsed_ms == pytest.approx(10 * fields[2] / rate * 1e3, rel=0.25)
