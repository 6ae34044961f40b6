"""`tuner node-resources`: which GPU types a machine offers to a cluster."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from device_fakes import A6000, H200, T4, UNKNOWN, pretend

from tuner.app.cli.machine import node_resources as command
from tuner.core.nvml import DeviceIdentity
from tuner.core.units import GIB


def run(*arguments: str):
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], {}),
        ([A6000], {"a6000": 1}),
        ([A6000, A6000], {"a6000": 2}),
        ([T4, H200, T4], {"t4": 2, "h200": 1}),
        ([UNKNOWN], {}),
        ([UNKNOWN, T4], {"t4": 1}),
        # Two types under names that differ in the memory only.
        ([DeviceIdentity("NVIDIA A100-SXM4-40GB", 40 * GIB, (8, 0), "580.1")], {"a100_40gb": 1}),
        ([DeviceIdentity("NVIDIA A100-SXM4-80GB", 79 * GIB, (8, 0), "580.1")], {"a100_80gb": 1}),
    ],
)
def test_each_type_is_counted(monkeypatch, devices, expected):
    pretend(monkeypatch, *devices)
    assert json.loads(run().stdout) == expected


def test_what_ray_reads_is_all_of_stdout(monkeypatch):
    pretend(monkeypatch, UNKNOWN, T4, A6000)
    assert run().stdout == '{"t4": 1, "a6000": 1}\n'


def test_unknown_gpu_is_said_with_what_to_do(monkeypatch):
    pretend(monkeypatch, UNKNOWN)
    said = run().stderr
    assert "RTX 9999" in said
    assert "GPU 0" in said
    assert "tuner calibrate" in said


def test_several_types_are_said_with_what_to_do(monkeypatch):
    pretend(monkeypatch, T4, A6000, T4)
    said = run().stderr
    assert "t4: 0,2, a6000: 1" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def test_only_visible_gpus_are_counted(monkeypatch):
    pretend(monkeypatch, T4, T4, T4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert json.loads(run().stdout) == {"t4": 2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert json.loads(run().stdout) == {}


def test_json_says_of_every_device_what_it_is(monkeypatch):
    pretend(monkeypatch, A6000, UNKNOWN)
    found = json.loads(run("--json").stdout)
    assert found["resources"] == {"a6000": 1}
    assert found["num_gpus"] == 2
    assert [(d["index"], d["gpu"]) for d in found["devices"]] == [(0, "a6000"), (1, None)]
    assert found["devices"][1]["memory_bytes"] == UNKNOWN.total_bytes
