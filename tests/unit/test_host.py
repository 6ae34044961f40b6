"""Facts about this machine, read from files as the kernel writes them."""

import sys

import pytest

from tuner.core import host
from tuner.core.units import GIB

CPUINFO = "processor\t: 0\nmodel name\t: Testium 9 @ 3.0GHz\nprocessor\t: 1\nmodel name\t: other\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    paths = {name: tmp_path / name for name in ("cpuinfo", "meminfo", "v2", "v1")}
    monkeypatch.setattr(host, "_CPU_FACTS", paths["cpuinfo"])
    monkeypatch.setattr(host, "_MEMORY_FACTS", paths["meminfo"])
    monkeypatch.setattr(host, "_CGROUP_LIMITS", (paths["v2"], paths["v1"]))
    paths["meminfo"].write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    return paths


def test_name_is_the_kernels(files):
    files["cpuinfo"].write_text(CPUINFO)
    assert host.cpu_name() == "Testium 9 @ 3.0GHz"


@pytest.mark.parametrize("text", ["", "processor\t: 0\nBogoMIPS\t: 50.00\n"])
def test_name_is_the_architecture_where_the_kernel_names_none(files, text):
    files["cpuinfo"].write_text(text)
    assert host.cpu_name()


@pytest.mark.parametrize(
    ("limits", "gib"),
    [
        ({}, 16),
        ({"v2": "max\n"}, 16),
        ({"v2": f"{4 * GIB}\n"}, 4),
        ({"v1": f"{3 * GIB}\n"}, 3),
        ({"v1": "9223372036854771712\n"}, 16),
    ],
)
def test_memory_is_what_the_container_allows(files, limits, gib):
    for name, text in limits.items():
        files[name].write_text(text)
    assert host.usable_memory_bytes() == gib * GIB


def test_this_machine_answers():
    assert host.cpu_name()
    assert host.usable_memory_bytes() > 256 * 1024**2
    assert host.usable_cpus() >= 1


def test_a_program_is_on_the_path_or_beside_python(tmp_path, monkeypatch):
    for folder, name in (("bin", "python3"), ("bin", "trl"), ("other", "trl"), ("other", "nvcc")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert host.find_program("trl") == str(tmp_path / "bin" / "trl")
    assert host.find_program("trl", str(tmp_path / "other")) == str(tmp_path / "other" / "trl")
    assert host.find_program("python") == sys.executable
    assert host.find_program("nvcc") is None
    assert host.find_program(str(tmp_path / "other" / "nvcc")) is not None
    assert host.find_program("./python") is None
