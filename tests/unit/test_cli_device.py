"""What `--gpu auto` and `--gpu cpu` mean here, and where trials then run."""

import json
import math

import pytest
from device_fakes import A6000, H200, T4, UNKNOWN, pretend, profile_of
from node_fakes import answer_of, node_of

from tuner.app import measuring
from tuner.app.cli.main import run
from tuner.app.device import find_gpu, local_gpus
from tuner.app.measuring import Predicting
from tuner.core import host
from tuner.core.errors import InputError, UnavailableError
from tuner.core.units import GIB
from tuner.cost.speed.profile import profile_path
from tuner.searches.nodes import ACCELERATOR, NODE_GROUP, Node, Nodes
from tuner.searches.options import Mode, SearchOptions
from tuner.space.gpus import LIMIT_OF_TYPE, get_gpu


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Two processors, 8 GiB, no GPU, no device profiles."""
    monkeypatch.setenv("TUNER_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(host, "cpu_name", lambda: "Testium 9")
    monkeypatch.setattr(host, "usable_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(host, "usable_cpus", lambda: 2)
    pretend(monkeypatch)


def decide(mode, gpu, **options):
    return measuring.decide(SearchOptions(mode=mode, **options), gpu)


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
        assert found.local == (1, 2)
        assert found.resources == {"GPU": 1.0, "CPU": 1.0}
        assert (found.memory_limit_bytes, found.stands_in) == (None, False)
        assert found.text(get_gpu("a6000")) == "measured on 2 x NVIDIA RTX A6000"

    def test_without_one_simulates_and_says_why(self, monkeypatch):
        assert decide(Mode.AUTO, get_gpu("a6000")) == Predicting("this machine has no NVIDIA GPU")
        pretend(monkeypatch, T4)
        found = decide(Mode.AUTO, get_gpu("a6000"))
        assert "no NVIDIA RTX A6000, only Tesla T4 with" in found.why
        pretend(monkeypatch, H200)
        found = decide(Mode.AUTO, get_gpu("a6000"))
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
        assert (found.device, found.resources, found.local) == ("cpu", {"CPU": 2.0}, ())
        with pytest.raises(InputError, match="2 trials at once on one processor"):
            decide(Mode.AUTO, find_gpu("cpu"), workers=2)
        with pytest.raises(InputError, match="--address names another machine"):
            decide(Mode.AUTO, find_gpu("cpu"), address="auto")

    def surveyed(self, monkeypatch, *nodes: Node, gpu="a6000", **need):
        """What a search for a GPU type decides on a cluster of these nodes."""
        from tuner.searches.ray import cluster as of_ray

        def survey(address, needs):
            found = Nodes(lambda: nodes, answer_of)
            found.refresh(wait=True)
            met = tuple(need for need in needs if found.usable(need))
            return of_ray._Survey(met, found.grows(), found.emulated, found.missing(needs[0]))

        monkeypatch.setattr(of_ray, "survey", survey)
        monkeypatch.setattr(measuring, "checked_address", lambda address: address)
        return decide(Mode.AUTO, get_gpu(gpu), address="10.0.0.1:6379", **need)

    @pytest.mark.parametrize(
        "node",
        [
            node_of("NVIDIA RTX A6000", labels={ACCELERATOR: "RTX-A6000"}),
            node_of("NVIDIA RTX A6000", **{"accelerator_type:A6000": 1.0}),
            node_of("NVIDIA RTX A6000", a6000=1.0),
            node_of("NVIDIA RTX A6000", labels={ACCELERATOR: "pool-7"}),
            node_of("NVIDIA RTX A6000"),
        ],
        ids=["label", "accelerator type", "resource", "label of others", "nothing"],
    )
    def test_cluster_measures_however_its_node_names_the_gpu(self, monkeypatch, node):
        found = self.surveyed(monkeypatch, node)
        assert (found.resources, found.awaited) == ({"GPU": 1.0, "CPU": 1.0}, False)
        assert found.names == get_gpu("a6000").device_names

    @pytest.mark.parametrize(
        ("node", "why"),
        [
            (node_of("NVIDIA RTX A6000", labels={ACCELERATOR: "L4"}), "has L4"),
            (node_of("NVIDIA L4", labels={ACCELERATOR: "RTX-A6000"}), "has NVIDIA L4 (22.0"),
            (node_of("NVIDIA RTX A6000", CPU=0.0), "has 0 CPU"),
            (node_of(None), "has no NVIDIA driver"),
            (node_of("NVIDIA RTX A6000", torch="1.0"), "has torch 1.0, and this search "),
            (node_of("NVIDIA RTX A6000", torch=None), "has no torch, and this search "),
        ],
    )
    def test_a_cluster_without_a_fitting_node_ends_with_what_it_has(self, monkeypatch, node, why):
        with pytest.raises(UnavailableError, match="which needs 1 GPU") as raised:
            self.surveyed(monkeypatch, node)
        assert why in raised.value.message
        assert "ray start --address" in raised.value.hint

    def test_only_nodes_with_the_labels_and_the_memory_count(self, monkeypatch):
        node = node_of("NVIDIA RTX A6000", labels={"team": "vision"}, memory=8e9)
        found = self.surveyed(monkeypatch, node, labels=("team=vision",), host_memory=10**9)
        assert found.resources["memory"] == 1e9
        for need in ({"labels": ("team=nlp",)}, {"host_memory": 10**10}):
            with pytest.raises(UnavailableError, match=r"has no label team=nlp|has .* memory"):
                self.surveyed(monkeypatch, node, **need)

    def test_a_cluster_that_grows_is_asked_for_the_type(self, monkeypatch):
        head = Node("h", "head", {"CPU": 4.0}, {NODE_GROUP: "head"})
        found = self.surveyed(monkeypatch, head)
        assert found.awaited
        assert "has to start a node first" in found.text(get_gpu("a6000"))
