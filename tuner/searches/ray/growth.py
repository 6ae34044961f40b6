"""Whether a cluster starts nodes when they are needed."""

from __future__ import annotations

import json
import re

import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from tuner.searches.ray.ray_private import autoscaler_status

NODE_AS_TYPE = re.compile("node_[0-9a-f]{20,}")


def grows() -> bool:
    """Whether the connected cluster starts nodes on demand.

    Ray's monitor reports the types of the nodes that it runs. Where nobody starts any, each node
    is a type of its own, named after its id.
    """
    status = autoscaler_status()
    if status is not None:
        report = json.loads(status).get("autoscaler_report") or {}
        types = {*(report.get("active_nodes") or ()), *(report.get("idle_nodes") or ())}
        return any(not NODE_AS_TYPE.fullmatch(name) for name in types)
    found = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*found.active_nodes, *found.idle_nodes]
    types = {node.ray_node_type_name for node in nodes if node.ray_node_type_name}
    return any(not NODE_AS_TYPE.fullmatch(name) for name in types)
