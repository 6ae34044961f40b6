"""A search makes a cluster start the nodes that its trials need, from none."""

import json
import os
from pathlib import Path

import pytest
from job_server import ROOT, TOKEN, job_cluster
from started import run_python

TESTS = Path(__file__).parent
NODE_BYTES = 80_000_000


def config(gcs_address: str) -> dict:
    """Ray's provider of make-believe nodes, each a raylet on this machine."""

    def node(gpu: str) -> dict:
        resources = {"CPU": 1, "GPU": 1, gpu: 1, "object_store_memory": NODE_BYTES}
        return {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 1}

    return {
        "cluster_name": "make-believe",
        "max_workers": 4,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": gcs_address,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "a6000": node("a6000"),
            "t4": node("t4"),
            "h100_sxm": node("h100_sxm"),
        },
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "initialization_commands": [],
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "auth": {},
    }


@pytest.mark.proof
def test_a_search_of_two_types_starts_a_node_of_each_and_no_other(tmp_path):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    scaling = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    # As the cluster launcher and KubeRay set it for the head node.
    scaling["RAY_NODE_TYPE_NAME"] = "ray.head.default"
    path = tmp_path / "autoscaling.json"

    def arguments(gcs_address: str) -> list[str]:
        path.write_text(json.dumps(config(gcs_address)))
        return ["--num-cpus=0", "--num-gpus=0", f"--autoscaling-config={path}"]

    with job_cluster(tmp_path / "cluster", {**token, **scaling}, arguments) as cluster:
        done = run_python(
            str(TESTS / "autoscaled_search.py"),
            cluster.gcs_address,
            env={**os.environ, **token, "PYTHONPATH": f"{ROOT}:{TESTS}"},
            timeout=400,
        )
        assert done.returncode == 0, f"{done.stderr[-4000:]}\n{cluster.log.read_text()[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["grows"]
    assert "GPU" not in found["before"]
    assert found["trials"] == [{"a6000": 4}, {"t4": 4}]
    assert found["after"]["a6000"] == found["after"]["t4"] == 1
    assert "h100_sxm" not in found["after"]
