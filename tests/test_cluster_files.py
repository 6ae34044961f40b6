"""The cluster files that ship: read by Ray's own code, and true to the GPU catalogue."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli

from tuner.app.cli.main import cli
from tuner.core.units import GIB
from tuner.space.gpus import load_catalogue, match_device

ROOT = Path(__file__).parents[1]
CLOUD, ON_PREMISE, KUBERAY = (
    ROOT / name for name in ("cluster.yaml", "cluster-onprem.yaml", "cluster-kuberay.yaml")
)

# GPUs of each instance: how many, their exact name, and memory as AWS states it.
# docs.aws.amazon.com/ec2/latest/instancetypes/ac.html
INSTANCES = {
    "g4dn.xlarge": (1, "Tesla T4", 16, 4),
    "g5.xlarge": (1, "NVIDIA A10G", 24, 4),
    "g6.xlarge": (1, "NVIDIA L4", 24, 4),
    "p4d.24xlarge": (8, "NVIDIA A100-SXM4-40GB", 40, 96),
    "p4de.24xlarge": (8, "NVIDIA A100-SXM4-80GB", 80, 96),
    "p5.4xlarge": (1, "NVIDIA H100 80GB HBM3", 80, 16),
}
WANTED_IN_CLOUD = {"t4", "a10g", "l4", "a100_40gb", "a100_80gb", "h100_sxm"}

# The fields of KubeRay's API (ray-project.github.io/kuberay/reference/api) that may be used: what
# Kubernetes does not know, it drops without a word.
SPEC = {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions"}
SPEC |= {"headGroupSpec", "workerGroupSpecs"}
OPTIONS = {"upscalingMode", "idleTimeoutSeconds"}
HEAD = {"rayStartParams", "template"}
GROUP = HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


def read(path: Path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE])
def test_ray_takes_the_file(path):
    prepared = prepare_config(read(path))
    validate_config(prepared)
    assert set(read(path)) <= set(prepared) | {"min_workers"}


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE])
def test_ray_refuses_what_it_does_not_know(path):
    wrong = {**read(path), "workers": 3}
    with pytest.raises(Exception, match="workers"):
        validate_config(prepare_config(wrong))


def worker_types() -> dict[str, dict]:
    config = read(CLOUD)
    types = copy.deepcopy(config["available_node_types"])
    types.pop(config["head_node_type"])
    return types


def test_every_gpu_type_of_the_cloud_starts_from_nothing():
    types = worker_types()
    assert set(types) == WANTED_IN_CLOUD
    for name, each in types.items():
        assert each["min_workers"] == 0, name
        assert each["max_workers"] > 0, name
        assert each["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}


@pytest.mark.parametrize("gpu_id", sorted(WANTED_IN_CLOUD))
def test_instance_has_the_gpus_that_its_type_promises(gpu_id):
    found = worker_types()[gpu_id]
    number, name, gigabytes, cpus = INSTANCES[found["node_config"]["InstanceType"]]
    assert found["resources"] == {"CPU": cpus, "GPU": number, gpu_id: number}
    gpu = load_catalogue()[gpu_id]
    assert name in gpu.device_names
    assert match_device(name, gpu.memory_bytes).id == gpu_id
    # A label's gigabytes are more than what a program sees of them, by up to a tenth.
    assert 0.85 * gigabytes < gpu.memory_bytes / GIB <= gigabytes


def test_head_of_the_cloud_has_no_gpu_and_no_spot():
    config = read(CLOUD)
    head = config["available_node_types"][config["head_node_type"]]
    assert "GPU" not in head["resources"]
    assert "InstanceMarketOptions" not in head["node_config"]


def commands_of(config: dict) -> list[str]:
    return [text for key in config if key.endswith("_commands") for text in config[key]]


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE])
def test_commands_and_options_in_it_exist(path):
    config = read(path)
    text = "\n".join(commands_of(config))
    said = re.findall(r"\btuner ([a-z-]+)", text + path.read_text())
    assert "node-resources" in said
    assert {word for word in said if cli.get_command(None, word) is None} == set()
    used = set(re.findall(r"^#   ray ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert {"job", "rsync-down"} <= used <= set(ray_cli.commands)
    options = set(re.findall(r"(--[a-z-]+)(?==| |$)", "\n".join(_ray_starts(config))))
    known = {name for param in ray_cli.commands["start"].params for name in param.opts}
    assert options
    assert options <= known


def _ray_starts(config: dict) -> list[str]:
    return [part for text in commands_of(config) for part in text.split(";") if "ray start" in part]


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE])
def test_workers_say_what_they_have_and_nothing_is_opened(path):
    config = read(path)
    assert '--resources="$(tuner node-resources)"' in config["worker_start_ray_commands"][-1]
    head = config["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in head
    assert "RAY_JOB_STOP_WAIT_TIME_S=120" in head
    for command in (head, config["worker_start_ray_commands"][-1]):
        assert "RAY_AUTH_MODE=token" in command


def test_on_premise_cluster_has_all_its_machines():
    config = read(ON_PREMISE)
    number = len(config["provider"]["worker_ips"])
    prepared = prepare_config(config)
    (only,) = prepared["available_node_types"].values()
    assert (only["min_workers"], only["max_workers"]) == (number, number)


# -- Kubernetes -------------------------------------------------------------------------------


def ray_cluster() -> dict:
    found = [d for d in yaml.safe_load_all(KUBERAY.read_text()) if d["kind"] == "RayCluster"]
    assert len(found) == 1
    return found[0]


def test_ray_reads_the_kubernetes_cluster():
    cluster = ray_cluster()
    cluster["metadata"]["namespace"] = "default"  # where it was applied
    types = autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster)[
        "available_node_types"
    ]
    workers = {name: each for name, each in types.items() if name != "headgroup"}
    assert types["headgroup"]["resources"]["GPU"] == 0
    offered = set()
    for name, each in workers.items():
        gpu_id = name.replace("-", "_")
        offered.add(gpu_id)
        assert (each["min_workers"], each["resources"]["GPU"], each["resources"][gpu_id]) == (
            0, 1, 1,
        ), name  # fmt: skip
        assert each["max_workers"] > 0
        assert gpu_id in load_catalogue()
    assert offered == WANTED_IN_CLOUD | {"a6000", "titan_rtx"}


def test_pods_go_to_nodes_with_exactly_their_gpu():
    for group in ray_cluster()["spec"]["workerGroupSpecs"]:
        gpu = load_catalogue()[group["groupName"].replace("-", "_")]
        label = group["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"]
        assert label in {name.replace(" ", "-") for name in gpu.device_names}
        # In quotes for a shell, and again for YAML.
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {gpu.id: 1}


def test_kubernetes_cluster_uses_fields_that_exist_and_opens_nothing():
    cluster = ray_cluster()
    spec, head = cluster["spec"], cluster["spec"]["headGroupSpec"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert set(spec) <= SPEC
    assert set(spec["autoscalerOptions"]) <= OPTIONS
    assert set(head) <= HEAD
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["authOptions"] == {"mode": "token"}
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    known = {name for param in ray_cli.commands["start"].params for name in param.opts}
    for group in [head, *spec["workerGroupSpecs"]]:
        assert set(group) <= GROUP
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
        mounted = {m["name"] for m in group["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {v["name"] for v in group["template"]["spec"]["volumes"]}


def test_results_on_kubernetes_lie_on_a_volume_that_stays():
    claims = [
        d for d in yaml.safe_load_all(KUBERAY.read_text()) if d["kind"] == "PersistentVolumeClaim"
    ]
    pod = ray_cluster()["spec"]["headGroupSpec"]["template"]["spec"]
    named = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert [claim["metadata"]["name"] for claim in claims] == [named]
    (mounted,) = pod["containers"][0]["volumeMounts"]
    assert f"--results {mounted['mountPath']}\n" in KUBERAY.read_text()
    assert pod["securityContext"]["fsGroup"]  # else the volume is root's
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "120"} in pod["containers"][0]["env"]
