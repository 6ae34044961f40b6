"""Nodes of a cluster that are only numbers, and what they answer when they are asked."""

from concurrent.futures import Future

from tuner.core.nvml import DeviceIdentity
from tuner.searches.nodes import Need, Node
from tuner.space.gpus import load_catalogue
from tuner.trial.factories import Facts


def node_of(
    device: str | None, *, labels=None, torch="same", number: int = 0, **resources: float
) -> Node:
    """A node with a GPU of this name; its own answer is its id."""
    has = {"CPU": 2.0, "GPU": 1.0, **resources}
    return Node(f"{device}/{torch}/{number}", f"w{number}", has, labels or {})


def answer_of(node: Node, need: Need) -> Future[Facts]:
    """The answer of a node of `node_of`."""
    device, torch, _ = node.id.split("/")
    gpu = next((g for g in load_catalogue().values() if device in g.device_names), None)
    found = gpu and DeviceIdentity(device, gpu.memory_bytes, (8, 6), "570.0")
    versions = {**need.versions, "torch": torch} if torch != "same" else need.versions
    if torch == "None":
        versions = {"tuner": versions["tuner"]}
    future: Future[Facts] = Future()
    future.set_result(Facts(found, versions, emulated=False))
    return future
