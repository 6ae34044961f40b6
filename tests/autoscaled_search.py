"""A search of two GPU types on a cluster that has no node for either; what came of it, as JSON.

A process of its own, because Ray reads the token of a cluster once in a process.
"""

import functools
import json
import sys
from collections import Counter
from dataclasses import dataclass

import ray
from tune_fakes import SMALL_SPACE, FakeFactory

from tuner.core.nvml import DeviceIdentity
from tuner.searches.nodes import Need
from tuner.searches.options import SearchOptions
from tuner.searches.ray.cluster import survey
from tuner.searches.ray.driver import search_all
from tuner.searches.request import SearchRequest
from tuner.space.gpus import get_gpu

GPUS = ("a6000", "t4")


def main(address: str) -> None:
    needs = [Need({"GPU": 1.0, "CPU": 1.0}, get_gpu(gpu)) for gpu in GPUS]
    before = survey(address, needs)
    ray.init(address=address, log_to_driver=False)
    offered = ray.cluster_resources()
    requests = [
        SearchRequest(
            space=SMALL_SPACE,
            gpu=get_gpu(gpu),
            runner_factory=OnNodeOf(gpu),
            options=SearchOptions(trials=4, searcher="random", address=address, verify=False),
            resources_per_trial={"GPU": 1.0, "CPU": 1.0},
        )
        for gpu in GPUS
    ]
    results = search_all(requests)
    found = {
        "grows": before.grows,
        "before": offered,
        "trials": [dict(Counter(record.gpu for record in r.records)) for r in results],
        "nodes": [sorted({record.node for record in r.records}) for r in results],
        "stopped_by": [r.stopped_by for r in results],
        "after": ray.cluster_resources(),
    }
    print("\n" + json.dumps(found))


def identity_of(gpu: str) -> DeviceIdentity:
    """What a node says that has such a GPU."""
    found = get_gpu(gpu)
    return DeviceIdentity(found.device_names[0], found.memory_bytes, (8, 6), "570.0")


@dataclass(frozen=True)
class OnNodeOf:
    """A factory on whose nodes there seem to be GPUs of a type."""

    gpu: str

    @property
    def identify(self):
        return functools.partial(identity_of, self.gpu)

    def __call__(self):
        return FakeFactory()()


if __name__ == "__main__":
    main(sys.argv[1])
