"""What `tuner doctor` finds on machines that are well and on those that are not."""

import json
from importlib import metadata

import pytest
from device_fakes import A6000, pretend

from tuner.app import device
from tuner.app.cli import machine
from tuner.app.cli.machine import _Finding, examine
from tuner.app.cli.main import run
from tuner.core import host
from tuner.core.errors import UnavailableError, install_command
from tuner.core.records import Outcome, Status
from tuner.core.units import GIB


def found(outcome: Outcome | Exception, monkeypatch: pytest.MonkeyPatch) -> _Finding:
    """The finding about the trial on the GPU of a machine, which ends so."""

    def ran(self: object, *trial: object) -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    pretend(monkeypatch, A6000)
    monkeypatch.setattr("tuner.app.measuring.Measuring.run", ran)
    said: list[str] = []
    findings = list(examine(said.append))
    assert said == ["training a tiny model on GPU 0 ..."]
    assert [f.level for f in findings if f.check in ("GPU", "driver")] == ["ok", "ok"]
    return findings[-1]


def test_a_gpu_that_trains_is_well(monkeypatch):
    assert found(Outcome(Status.OK), monkeypatch).level == "ok"


@pytest.mark.parametrize(
    ("outcome", "text", "fix"),
    [
        (UnavailableError("GPU 0 is in use", hint="wait"), "GPU 0 is in use", "wait"),
        (
            Outcome(Status.CRASHED, message="CUDA error: no kernel image is available"),
            "crashed: CUDA error: no kernel image",
            "install a build of PyTorch",
        ),
        (
            Outcome(Status.CRASHED, message="The NVIDIA driver on your system is too old"),
            "too old",
            "update the driver",
        ),
        (Outcome(Status.CRASHED, message="bitsandbytes: no"), "no", "python -m bitsandbytes"),
        (
            Outcome(Status.TIMEOUT),
            "timeout",
            "tuner trial --space tiny_cpu --device cuda:0 --set precision=nf4",
        ),
    ],
)
def test_a_trial_that_fails_says_why_and_what_to_do(outcome, text, fix, monkeypatch):
    finding = found(outcome, monkeypatch)
    assert (finding.check, finding.level) == ("trial on 0", "problem")
    assert text in finding.text
    assert fix in finding.fix


def test_libraries_that_are_missing_or_too_old(monkeypatch):
    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.9.1", "ray": "2.52.0a0+nv26"}.get(name, "99.0")

    pretend(monkeypatch)
    monkeypatch.setattr(machine.metadata, "version", version)
    findings = list(examine(print))
    levels = {f.check: (f.level, f.text) for f in findings}
    assert levels["peft"] == ("problem", "not installed")
    assert install_command("all") in {f.fix for f in findings}
    assert levels["torch"] == ("problem", "2.9.1 is older than 2.11, the oldest that works")
    assert "ray 2.52.0a0+nv26" in levels["libraries"][1]


def test_without_a_gpu_it_says_so_and_ends_well(monkeypatch, capsys):
    pretend(monkeypatch)
    assert run(["doctor"]) == 0
    assert "no NVIDIA GPU on this machine" in capsys.readouterr().out


SIGNS = {
    "a driver in /proc": "proc/driver/nvidia/gpus/0000:01:00.0",
    "gVisor": "dev/nvidia0",
    "Jetson": "dev/nvmap",
    "WSL": "usr/lib/wsl/lib/libcuda.so.1",
}


@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
def test_a_driver_that_does_not_answer_is_a_problem(sign, monkeypatch, tmp_path, capsys):
    pretend(monkeypatch)
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    monkeypatch.setattr(device, "_ROOT", tmp_path)
    with pytest.raises(UnavailableError, match="does not answer"):
        device.this_gpu()
    assert run(["doctor", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert "start it with --gpus all" in answer["findings"][-1]["fix"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert run(["doctor"]) == 0
    assert "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU" in capsys.readouterr().out


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
