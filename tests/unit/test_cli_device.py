"""What `--gpu auto` and `--gpu cpu` mean here, and where trials then run."""

from __future__ import annotations

import json
import math

import pytest
from device_fakes import A6000, H200, T4, UNKNOWN, pretend, profile_of

from tuner.app.cli.main import run
from tuner.app.device import find_gpu, local_gpus
from tuner.app.measuring import Measuring, Predicting, decide
from tuner.app.search.options import Mode
from tuner.core import host
from tuner.core.errors import InputError, UnavailableError
from tuner.core.units import GIB
from tuner.cost.speed.profile import profile_path
from tuner.space.gpus import LIMIT_OF_TYPE, get_gpu


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Two processors, 8 GiB, no GPU, no device profiles."""
    monkeypatch.setenv("TUNER_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(host, "cpu_name", lambda: "Testium 9")
    monkeypatch.setattr(host, "usable_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(host, "usable_cpus", lambda: 2)
    pretend(monkeypatch)


class TestProcessor:
    def test_has_this_machines_name_and_memory_and_no_invented_rates(self):
        gpu = find_gpu("CPU")
        assert (gpu.id, gpu.name, gpu.memory_bytes) == ("cpu", "Testium 9", 8 * GIB)
        assert gpu.flops == {}
        assert math.isnan(gpu.bandwidth_bytes_per_s)
        assert gpu.price_usd_per_hour is None

    @pytest.mark.parametrize(
        "arguments",
        [
            ("estimate", "--model", "qwen3-0.6b", "--gpu", "cpu"),
            ("check", "--gpu", "cpu", "train.py"),
            ("search", "--space", "tiny_cpu", "--gpu", "cpu", "--mode", "predict"),
        ],
    )
    def test_is_not_predicted(self, arguments, capsys):
        assert run(arguments) == 2
        error = capsys.readouterr().err
        assert "a processor isn't predicted" in error
        assert "`tuner search` and `tuner trial` with --gpu cpu measure on it" in error

    def test_is_printed_with_what_is_known(self, capsys):
        assert run(["gpus", "cpu"]) == 0
        text = capsys.readouterr().out
        assert "Testium 9" in text
        assert "TFLOP/s  unknown" in text
        assert run(["gpus", "cpu", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["flops"], answer["bandwidth_bytes_per_s"]) == ({}, None)


class TestAuto:
    def test_is_matched_by_exact_name_and_memory(self, monkeypatch):
        pretend(monkeypatch, A6000, A6000)
        assert find_gpu("auto").id == "a6000"

    def test_of_two_types_asks_which(self, monkeypatch):
        pretend(monkeypatch, A6000, T4)
        with pytest.raises(InputError, match="NVIDIA RTX A6000, Tesla T4"):
            find_gpu("auto")

    def test_unknown_device_is_known_once_it_is_calibrated(self, monkeypatch):
        pretend(monkeypatch, UNKNOWN)
        with pytest.raises(UnavailableError, match="RTX 9999") as caught:
            find_gpu("auto")
        assert "tuner calibrate" in str(caught.value)
        profile_of(UNKNOWN.name).save(profile_path(UNKNOWN.name))
        gpu = find_gpu("auto")
        assert (gpu.id, gpu.name) == ("nvidia_geforce_rtx_9999", UNKNOWN.name)
        assert gpu.compute_capability == (12, 0)
        assert gpu.flops["bf16"] == 2e11
        found = decide(Mode.AUTO, gpu)
        assert isinstance(found, Measuring)
        assert not found.stands_in

    @pytest.mark.parametrize(
        ("visible", "count"), [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), (None, 2)]
    )
    def test_only_visible_devices_count(self, monkeypatch, visible, count):
        pretend(monkeypatch, A6000, A6000)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(local_gpus()) == count


class TestDecide:
    def test_measures_on_every_gpu_of_the_type(self, monkeypatch):
        pretend(monkeypatch, T4, A6000, A6000)
        found = decide(Mode.AUTO, get_gpu("a6000"))
        assert isinstance(found, Measuring)
        assert found.local == (1, 2)
        assert found.resources == {"GPU": 1.0, "CPU": 1.0}
        assert (found.memory_limit_bytes, found.stands_in) == (None, False)
        assert found.text(get_gpu("a6000")) == "measured on 2 x NVIDIA RTX A6000"

    def test_without_one_simulates_and_says_why(self, monkeypatch):
        assert decide(Mode.AUTO, get_gpu("a6000")) == Predicting("this machine has no NVIDIA GPU")
        pretend(monkeypatch, T4)
        found = decide(Mode.AUTO, get_gpu("a6000"))
        assert isinstance(found, Predicting)
        assert "no NVIDIA RTX A6000, only Tesla T4 with" in found.why
        pretend(monkeypatch, H200)
        found = decide(Mode.AUTO, get_gpu("a6000"))
        assert isinstance(found, Predicting)
        assert "stands in for one with --memory-limit auto" in found.why

    def test_measure_without_one_is_an_error_and_predict_never_looks(self, monkeypatch):
        with pytest.raises(UnavailableError, match="no NVIDIA GPU"):
            decide(Mode.MEASURE, get_gpu("a6000"))
        pretend(monkeypatch, A6000)
        assert decide(Mode.PREDICT, get_gpu("a6000")) == Predicting("--mode predict")

    @pytest.mark.parametrize("limit", [LIMIT_OF_TYPE, 40 * GIB])
    def test_larger_gpu_stands_in_under_a_limit(self, monkeypatch, limit):
        pretend(monkeypatch, H200)
        gpu = get_gpu("a6000")
        found = decide(Mode.MEASURE, gpu, memory_limit=limit)
        assert isinstance(found, Measuring)
        expected = gpu.memory_bytes if limit == LIMIT_OF_TYPE else limit
        assert found.memory_limit_bytes == expected
        assert (found.stands_in, found.trial_device.device) == (True, "NVIDIA H200")
        text = found.text(gpu)
        assert "memory as on NVIDIA RTX A6000, speed as on NVIDIA H200" in text

    def test_smaller_gpu_does_not(self, monkeypatch):
        pretend(monkeypatch, T4)
        with pytest.raises(InputError, match="too small to stand in"):
            decide(Mode.AUTO, get_gpu("a6000"), memory_limit=LIMIT_OF_TYPE)

    def test_processor_is_there_and_runs_one_trial_at_a_time(self):
        found = decide(Mode.AUTO, find_gpu("cpu"))
        assert isinstance(found, Measuring)
        assert (found.device, found.resources, found.local) == ("cpu", {"CPU": 2.0}, ())
        with pytest.raises(InputError, match="2 trials at once on one processor"):
            decide(Mode.AUTO, find_gpu("cpu"), workers=2)
        with pytest.raises(InputError, match="--address names another machine"):
            decide(Mode.AUTO, find_gpu("cpu"), address="auto")

    @pytest.mark.parametrize(
        ("offered", "measures"),
        [
            ({"CPU": 8.0, "GPU": 1.0, "a6000": 1.0}, True),
            ({"CPU": 8.0, "GPU": 1.0}, False),
            ({"CPU": 8.0, "a6000": 1.0}, False),
        ],
    )
    def test_cluster_measures_where_a_node_offers_the_type(self, monkeypatch, offered, measures):
        from tuner.searches.ray import cluster

        monkeypatch.setattr(cluster, "offer", lambda address: cluster.Offer(offered))
        found = decide(Mode.AUTO, get_gpu("a6000"), address="10.0.0.1:6379")
        if measures:
            assert isinstance(found, Measuring)
            assert found.resources == {"GPU": 1.0, "a6000": 1.0, "CPU": 1.0}
            assert found.names == get_gpu("a6000").device_names
        else:
            assert isinstance(found, Predicting)
            assert "no node of the cluster has a GPU and the resource 'a6000'" in found.why
            assert "tuner node-resources" in found.why

    def test_a_cluster_that_grows_is_asked_for_the_type(self, monkeypatch):
        from tuner.searches.ray import cluster

        monkeypatch.setattr(cluster, "offer", lambda address: cluster.Offer({"CPU": 4.0}, True))
        found = decide(Mode.AUTO, get_gpu("a6000"), address="10.0.0.1:6379")
        assert isinstance(found, Measuring)
        assert found.awaited
        assert "has to start a node first" in found.text(get_gpu("a6000"))
