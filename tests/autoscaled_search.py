"""A search of two GPU types on a cluster that has no node for either; what came of it, as JSON.

A process of its own, because Ray reads the token of a cluster once in a process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import ray
from tune_fakes import SMALL_SPACE, FakeFactory

from tuner.app.measuring import Measuring, decide
from tuner.app.search.options import Mode
from tuner.searches.ray.cluster import offer
from tuner.searches.ray.driver import search_all
from tuner.searches.request import SearchRequest
from tuner.space.gpus import get_gpu

GPUS = ("a6000", "t4")
PATIENCE_S = 120
"""Ray's monitor, which starts nodes, reports some time after the head node answers."""


def main(address: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not (before := offer(address)).grows and time.monotonic() < until:
        time.sleep(1)
    decided = {gpu: decide(Mode.AUTO, get_gpu(gpu), address=address) for gpu in GPUS}
    ray.init(address=address, log_to_driver=False)
    requests = [
        SearchRequest(
            space=SMALL_SPACE,
            gpu=get_gpu(gpu),
            runner_factory=FakeFactory(),
            trials=4,
            searcher="random",
            address=address,
            resources_per_trial={"GPU": 1.0, gpu: 1.0, "CPU": 1.0},
        )
        for gpu in GPUS
    ]
    results = search_all(requests)
    found = {
        "grows": before.grows,
        "before": dict(before.resources),
        "awaited": [gpu for gpu, d in decided.items() if isinstance(d, Measuring) and d.awaited],
        "trials": [dict(Counter(record.gpu for record in r.records)) for r in results],
        "stopped_by": [r.stopped_by for r in results],
        "after": ray.cluster_resources(),
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
