"""What `tuner doctor` finds on machines that are well and on those that are not."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from device_fakes import A6000, pretend

from tuner.app import machine_facts
from tuner.app import probe as probing
from tuner.app.cli import machine as doctor
from tuner.app.cli.main import run
from tuner.app.device import LocalGpu
from tuner.app.doctor import examine
from tuner.app.machine_facts import Finding, MachineFacts, Severity
from tuner.app.own_settings import own_settings
from tuner.core import host, nvml
from tuner.core.nvml import DeviceProcess, DeviceUse
from tuner.core.records.reading import written
from tuner.core.units import GIB, MIB
from tuner.space.gpus import get_gpu

GPU = get_gpu("a6000")
DEVICE = LocalGpu(0, GPU.name, GPU.memory_bytes, (8, 6), GPU, used_bytes=300 * MIB)
WELL = MachineFacts(
    devices=(DEVICE,),
    driver="580.1",
    driver_cuda=(13, 0),
    has_device_files=True,
    probe={
        "torch_cuda": "12.8",
        "cuda_available": True,
        "architectures": ["sm_75", "sm_80", "sm_90", "compute_90"],
        "tf32": True,
        "flash_sdp": True,
        "bitsandbytes": "",
    },
    versions={"torch": "2.13.0+cu128", "peft": "0.21.2"},
    tested={"torch": "2.13.0", "peft": "0.21.2"},
    least={"torch": "2.11", "peft": "0.19"},
    flash_attn=True,
    cpus=16,
    host_total_bytes=64 * GIB,
    host_available_bytes=50 * GIB,
    shared_bytes=8 * GIB,
)


def probe(**changes: object) -> dict[str, object]:
    return {"probe": {**WELL.probe, **changes}}


def device(**changes: object) -> dict[str, object]:
    return {"devices": (dataclasses.replace(DEVICE, **changes),)}


T4 = get_gpu("t4")
TRAINER = DeviceProcess(12, "python", 30 * GIB)
CASES: list[tuple[dict[str, object], str, Severity, str]] = [
    ({"devices": (), "has_device_files": False}, "GPU", Severity.WARNING, "no NVIDIA GPU"),
    ({"devices": (), "has_device_files": True}, "GPU", Severity.PROBLEM, "does not answer"),
    (device(gpu=None), "GPU", Severity.WARNING, "not in the catalogue"),
    (probe(torch_cuda=None), "driver", Severity.PROBLEM, "built without CUDA"),
    (probe(torch_cuda="14.1"), "driver", Severity.PROBLEM, "was built for CUDA 14.1"),
    (probe(cuda_available=False), "driver", Severity.PROBLEM, "sees no GPU"),
    (probe(architectures=["sm_90"]), "driver", Severity.PROBLEM, "no kernels for"),
    (device(processes=(TRAINER,)), "free memory", Severity.WARNING, "python (process 12)"),
    (device(used_bytes=9 * GIB), "free memory", Severity.WARNING, "does not name"),
    ({"probe": {"error": "boom"}}, "torch works", Severity.PROBLEM, "boom"),
    (probe(bitsandbytes="no kernel"), "bitsandbytes works", Severity.PROBLEM, "no kernel"),
    ({"versions": {"torch": None}}, "torch", Severity.PROBLEM, "not installed"),
    ({"versions": {"torch": "2.9.1"}}, "torch", Severity.PROBLEM, "older than 2.11"),
    ({"versions": {"torch": "2.14.0"}}, "torch", Severity.WARNING, "tested with 2.13.0"),
    (probe(tf32=False), "tf32", Severity.WARNING, "x as fast"),
    ({"environment": {"NVIDIA_TF32_OVERRIDE": "0"}}, "tf32", Severity.WARNING, "for every program"),
    (probe(flash_sdp=False), "flash attention", Severity.WARNING, "turned off"),
    (
        device(name="T4", gpu=T4, compute_capability=(7, 5)),
        "flash attention",
        Severity.WARNING,
        "old",
    ),
    ({"cpus": 2}, "data loader", Severity.WARNING, "2 processors for 1 training process"),
    (
        {"environment": {"TOKENIZERS_PARALLELISM": "false"}},
        "TOKENIZERS_PARALLELISM",
        Severity.WARNING,
        "1 of 16 processors",
    ),
    ({"environment": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS", Severity.WARNING, "1 of 16"),
    (
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}},
        "allocator",
        Severity.WARNING,
        "without expandable_segments",
    ),
    (
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}},
        "allocator",
        Severity.PROBLEM,
        "names expandable_segment,",
    ),
    (
        {
            "environment": {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_ALLOC_CONF": "expandable_segments:False",
            }
        },
        "allocator",
        Severity.WARNING,
        " but ",
    ),
    (
        {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        "CUDA_LAUNCH_BLOCKING",
        Severity.WARNING,
        "waits for every kernel",
    ),
    ({"host_available_bytes": 2 * GIB}, "host memory", Severity.WARNING, "2.00 GiB available"),
    ({"host_total_bytes": 16 * GIB}, "host memory", Severity.WARNING, "less than the GPU's"),
    ({"shared_bytes": 64 * MIB}, "shared memory", Severity.WARNING, "64.0 MiB"),
]


def test_nothing_is_wrong_with_a_machine_that_is_well():
    findings = examine(WELL)
    assert {finding.level for finding in findings} == {Severity.OK}
    assert {"GPU", "driver", "free memory", "torch", "flash attention"} <= {
        finding.check for finding in findings
    }


@pytest.mark.parametrize(
    ("changes", "check", "level", "text"), CASES, ids=[case[3] for case in CASES]
)
def test_each_fault_is_found_with_what_to_do_and_nothing_else_is(changes, check, level, text):
    findings = examine(dataclasses.replace(WELL, **changes))
    found = [f for f in findings if f.check == check and f.level is level and text in f.text]
    assert len(found) == 1, findings
    assert found[0].fix
    others = {f.check for f in findings if f.level is not Severity.OK} - {check}
    assert others == set()


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_90"], (12, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        (["sm_120"], (12, 0), True),
        (["sm_100"], (12, 0), False),
    ],
)
def test_kernels_run_on_what_they_were_built_for(built_for, capability, runs):
    facts = dataclasses.replace(
        WELL, **probe(architectures=built_for), **device(compute_capability=capability)
    )
    lacking = [f for f in examine(facts) if "no kernels" in f.text]
    assert bool(lacking) != runs


class TestVersions:
    def test_tested_versions_are_those_of_the_constraints(self):
        assert machine_facts.tested()["torch"].count(".") == 2
        assert set(machine_facts.LIBRARIES) <= machine_facts.tested().keys()

    @pytest.mark.parametrize(
        ("one", "other", "older", "differs"),
        [
            ("2.9.1", "2.11", True, True),
            ("2.13.0+cpu", "2.13.0", False, False),
            ("2.13.4", "2.13.0", False, False),
            ("10.0", "9.9", False, True),
            ("2.13.0a0+nv26.1", "2.13", False, False),
        ],
    )
    def test_numbers_are_compared_as_numbers(self, one, other, older, differs):
        assert machine_facts.is_older(one, other) == older
        assert machine_facts.differs(one, other) == differs


class TestProbe:
    @pytest.mark.slow
    def test_the_libraries_here_work(self):
        found = probing.probe()
        assert found["bitsandbytes"] == ""
        assert found["cuda_available"] in (True, False)

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("raise ImportError('libcudart.so is missing')", "libcudart.so is missing"),
            ("import os; os.abort()", "exit code -6"),
            ("print('chatter')", "no answer"),
        ],
    )
    def test_a_process_that_gives_no_answer_is_an_error(self, code, said):
        assert said in probing.probe((sys.executable, "-c", code))["error"]

    def test_a_process_that_hangs_is_given_up(self, monkeypatch):
        monkeypatch.setattr(probing, "TIMEOUT_S", 0.2)
        found = probing.probe((sys.executable, "-c", "import time; time.sleep(60)"))
        assert "no answer within" in found["error"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "loader:\n  num_workers: 1\n", "one process loads the data"),
        ("a.py", "args = dict(dataloader_num_workers=0)\n", "the training process loads"),
        ("a.yaml", "tf32: false\n", "without tensor cores"),
        ("a.json", '{"model": {"attn_implementation": "eager"}}', "score matrices"),
        ("a.yaml", "pin_memory: false\n", "not page-locked"),
        ("a.yaml", "num_workers: 4\ntf32: true\nattn_implementation: sdpa\n", None),
    ],
)
def test_own_settings_that_cost_speed(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    found = list(own_settings(path, cpus=8))
    assert len(found) == (said is not None)
    if said:
        assert said in found[0].text
        assert str(path) in found[0].text
        assert found[0].level is Severity.WARNING


class TestCommand:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        monkeypatch.setattr("tuner.app.cli.machine.probe", lambda: dict(WELL.probe))
        monkeypatch.setenv("COLUMNS", "100")

    def test_without_a_gpu_it_says_so_and_ends_well(self, monkeypatch, capsys):
        pretend(monkeypatch)
        assert run(["doctor"]) == 0
        text = capsys.readouterr().out
        assert "no NVIDIA GPU on this machine" in text
        assert "no problems, " in text

    def test_a_problem_is_an_exit_code(self, monkeypatch, capsys):
        pretend(monkeypatch)
        monkeypatch.setattr("tuner.app.cli.machine.probe", lambda: {"error": "no torch"})
        assert run(["doctor", "--json"]) == 3
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is False
        levels = {f["check"]: f["level"] for f in found["findings"]}
        assert levels["torch works"] == "problem"

    def test_a_gpu_is_looked_at_through_the_driver(self, monkeypatch, capsys):
        pretend(monkeypatch, A6000)

        def device_use(index: int = 0, *, pid: int | None = None) -> DeviceUse:
            return DeviceUse(GIB // 2, A6000.total_bytes, None)

        def device_processes(index: int = 0) -> tuple[DeviceProcess, ...] | None:
            return ()

        monkeypatch.setattr(nvml, "device_use", device_use)
        monkeypatch.setattr(nvml, "device_processes", device_processes)
        monkeypatch.setattr(nvml, "driver_cuda_version", lambda: (13, 0))
        facts = doctor.gather()
        assert facts.driver == "580.1"
        assert [d.gpu.id for d in facts.devices if d.gpu] == ["a6000"]
        assert run(["doctor"]) == 0
        assert "known as a6000" in capsys.readouterr().out

    def test_own_files_are_looked_at(self, monkeypatch, capsys, tmp_path):
        pretend(monkeypatch)
        (tmp_path / "c.yaml").write_text("tf32: false\n")
        assert run(["doctor", "--config", str(tmp_path / "c.yaml")]) == 0
        assert "your settings" in capsys.readouterr().out
        assert run(["doctor", "--config", str(tmp_path / "none.yaml")]) == 2


def test_findings_as_json():
    finding = Finding("GPU", Severity.OK, "fine")
    assert written(finding) == {"check": "GPU", "level": "ok", "text": "fine", "fix": ""}


def test_host_memory_of_a_container(tmp_path, monkeypatch):
    paths = {n: tmp_path / n for n in ("meminfo", "limit", "current", "stat")}
    monkeypatch.setattr(host, "_MEMORY_FACTS", paths["meminfo"])
    monkeypatch.setattr(host, "_CGROUP_LIMITS", (paths["limit"],))
    monkeypatch.setattr(host, "_CGROUP_USE", paths["current"])
    monkeypatch.setattr(host, "_CGROUP_FACTS", paths["stat"])
    assert host.available_memory_bytes() is None
    paths["meminfo"].write_text("MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n")
    assert host.available_memory_bytes() == 12 * GIB
    paths["limit"].write_text(f"{8 * GIB}\n")
    paths["current"].write_text(f"{5 * GIB}\n")
    paths["stat"].write_text(f"anon {2 * GIB}\ninactive_file {3 * GIB}\n")
    assert host.available_memory_bytes() == 6 * GIB  # file caches can be had back
