"""The cluster files that ship: read by Ray's own code, and true to the GPU catalogue."""

import copy
import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli

from tuner.app.cli.main import cli
from tuner.core.units import GIB
from tuner.searches.nodes import ACCELERATOR
from tuner.space.gpus import accelerator_names, accelerator_types, load_catalogue, match_device

ROOT = Path(__file__).parents[1]
CLOUD, ON_PREMISE, KUBERAY, KUBERAY_JOB = (
    ROOT / f"cluster{name}.yaml" for name in ("", "-onprem", "-kuberay", "-kuberay-job")
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

CRDS = json.loads((ROOT / "tests/shared_cases/kuberay_crds.json").read_text())
LONGEST_JOB_NAME = 47  # KubeRay makes names of clusters and services from it


def read(path: Path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE])
def test_ray_takes_the_file(path):
    prepared = prepare_config(read(path))
    validate_config(prepared)
    assert set(read(path)) <= set(prepared) | {"min_workers"}


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
    assert {k: found["resources"][k] for k in ("CPU", "GPU")} == {"CPU": cpus, "GPU": number}
    assert gpu_id in accelerator_types(found["labels"][ACCELERATOR])
    # A running A100 has the same name for Ray, whatever its memory.
    assert found["resources"].get(gpu_id) == (number if gpu_id.startswith("a100") else None)
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
    assert "search" in said
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
def test_nothing_is_opened(path):
    config = read(path)
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


def manifest(path: Path, kind: str) -> dict:
    (found,) = [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == kind]
    return found


def ray_cluster() -> dict:
    return manifest(KUBERAY, "RayCluster")


def ray_job() -> dict:
    return manifest(KUBERAY_JOB, "RayJob")


def strict(schema):
    """The schema without unknown fields: Kubernetes drops them, with a warning at best."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {} if "additionalProperties" in schema else {"additionalProperties": False}
    return {name: strict(each) for name, each in schema.items()} | (
        closed if isinstance(schema.get("properties"), dict) and "type" in schema else {}
    )


def problems(resource: dict) -> list[str]:
    """What KubeRay's schema says against a resource."""
    schema = {**strict(CRDS[resource["kind"]]), "$defs": strict(CRDS["$defs"])}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(resource)
    return [f"{each.json_path}: {each.message}" for each in errors]


@pytest.mark.parametrize("resource", [ray_cluster, ray_job])
def test_kuberays_schema_takes_the_manifest(resource):
    assert resource()["apiVersion"] == "ray.io/v1"
    assert problems(resource()) == []


def test_the_job_meets_the_rules_that_are_in_the_operators_code():
    """ValidateRayJobSpec of KubeRay: no part of the schema."""
    job = ray_job()
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert len(job["metadata"]["name"]) <= LONGEST_JOB_NAME
    assert spec["shutdownAfterJobFinishes"] is True  # a ttl needs it
    assert "clusterSelector" not in spec  # a retry needs a cluster of its own
    assert cluster["rayVersion"]  # a token needs it
    # The operator submits through the service of the head node.
    assert "dashboard-host" not in cluster["headGroupSpec"]["rayStartParams"]
    for group in cluster["workerGroupSpecs"]:
        assert 0 == group["minReplicas"] == group["replicas"] < group["maxReplicas"]


def test_the_job_runs_a_search_on_the_volume_with_gpus_of_its_group():
    spec = ray_job()["spec"]
    command = shlex.split(spec["entrypoint"])
    assert command[:2] == ["tuner", "search"]
    given = cli.get_command(None, "search").make_context("search", command[2:]).params
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert str(given["results"]) == head["containers"][0]["volumeMounts"][0]["mountPath"]
    assert (given["address"], given["mode"]) == ("auto", "measure")  # no predictions as a success
    groups = {each["groupName"]: each for each in spec["rayClusterSpec"]["workerGroupSpecs"]}
    assert groups.keys() == {command[command.index("--gpu") + 1]}
    # The rest is that of the cluster that stays.
    cluster = ray_cluster()["spec"]
    (same,) = [each for each in cluster["workerGroupSpecs"] if each["groupName"] in groups]
    assert groups[same["groupName"]] == same
    stays = cluster["headGroupSpec"]["template"]["spec"]
    assert head == stays
    claims = [manifest(path, "PersistentVolumeClaim") for path in (KUBERAY, KUBERAY_JOB)]
    assert claims[0] == claims[1]


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE, KUBERAY, KUBERAY_JOB])
def test_what_is_installed_is_this_tuner(path):
    """The package index has another `tuner`."""
    installed = re.findall(r"pip install (?:-q )?(\S+)", path.read_text())
    assert {each for each in installed if "tuner" in each} <= {"'tuner-fit[pinned]'"}


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
        assert (each["min_workers"], each["resources"]["GPU"]) == (0, 1), name
        assert gpu_id in accelerator_types(each["labels"][ACCELERATOR])
        assert each["max_workers"] > 0
        assert gpu_id in load_catalogue()
    assert offered == WANTED_IN_CLOUD | {"a6000", "titan_rtx"}


def test_pods_go_to_nodes_with_exactly_their_gpu():
    for group in ray_cluster()["spec"]["workerGroupSpecs"]:
        gpu = load_catalogue()[group["groupName"].replace("-", "_")]
        label = group["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"]
        assert label in {name.replace(" ", "-") for name in gpu.device_names}
        assert group["labels"][ACCELERATOR] in accelerator_names(gpu)


def test_kubernetes_cluster_opens_nothing_and_mounts_what_it_declares():
    spec = ray_cluster()["spec"]
    head = spec["headGroupSpec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"  # the first one knows no labels
    assert spec["authOptions"] == ray_job()["spec"]["rayClusterSpec"]["authOptions"]
    assert spec["authOptions"] == {"mode": "token"}
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    known = {name for param in ray_cli.commands["start"].params for name in param.opts}
    for group in [head, *spec["workerGroupSpecs"]]:
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
        mounted = {m["name"] for m in group["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {v["name"] for v in group["template"]["spec"]["volumes"]}


def test_results_on_kubernetes_lie_on_a_volume_that_stays():
    claim = manifest(KUBERAY, "PersistentVolumeClaim")
    pod = ray_cluster()["spec"]["headGroupSpec"]["template"]["spec"]
    named = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim["metadata"]["name"] == named
    (mounted,) = pod["containers"][0]["volumeMounts"]
    assert f"--results {mounted['mountPath']}\n" in KUBERAY.read_text()
    assert pod["securityContext"]["fsGroup"]  # else the volume is root's
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "120"} in pod["containers"][0]["env"]


def test_every_name_that_ray_gives_to_a_gpu_means_its_type():
    for gpu in load_catalogue().values():
        for device in gpu.device_names:
            name = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(device)
            assert gpu.id in accelerator_types(name), device
            assert accelerator_names(gpu), device
