"""Mixed searches on a real Ray cluster of several nodes, which are killed and added meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared_cases.chaos_checks import Journals, begun, check_end, meanwhile, nodes_used, searched
from shared_cases.chaos_nodes import ChaosCluster, chaos_cluster

from tuner.searches.request import StoppedBy

TYPES = ("a6000", "l4", "h100_sxm")


@pytest.fixture(scope="module")
def nodes() -> Iterator[ChaosCluster]:
    with chaos_cluster() as cluster:
        yield cluster


@pytest.mark.proof
def test_three_true_fronts_while_nodes_are_killed_frozen_removed_and_added(nodes, tmp_path):
    journals = Journals(tmp_path, TYPES)
    doomed, broken = nodes.add("a6000"), nodes.add("a6000")
    leaving, silent = nodes.add("l4"), nodes.add("h100_sxm")
    nodes.add("h100_sxm", device="l4")  # a wrong label
    added = {}

    def events() -> None:
        """Trials from the tenth of each type on are held until these have happened."""
        for gpu_id in TYPES:
            assert journals.wait_for(gpu_id, 3)
        nodes.kill(doomed)
        assert journals.wait_for("a6000", 6)  # goes on with the other one
        journals.check_valid()
        nodes.freeze(silent)
        added["h100_sxm"] = nodes.add("h100_sxm")
        nodes.wait_until_dead(silent)
        journals.go_on("h100_sxm")
        assert journals.wait_for("h100_sxm", 12)
        journals.check_valid()
        added["l4"] = nodes.add("l4")
        nodes.remove(leaving)
        journals.go_on("l4")
        assert journals.wait_for("l4", 12)
        journals.check_valid()
        added["a6000"] = nodes.add("a6000")
        broken.lose_gpu()
        journals.go_on("a6000")
        assert journals.wait_for("a6000", 12)
        journals.check_valid()

    with meanwhile(events):
        results = searched(journals, nodes.address, sleep_s=0.05, held_from=10)
    check_end(journals, results)
    a6000, l4, h100 = results
    assert ("GPU is lost" in " ".join(a6000.warnings), l4.warnings) == (True, ())
    assert "has NVIDIA L4" in " ".join(h100.warnings)
    # What was added was used, and what was under way at an event ran once more.
    for gpu_id, node in added.items():
        assert node.name in nodes_used(journals, gpu_id)
    for gpu_id in TYPES:
        assert begun(journals, gpu_id).total() <= 24 + 3


@pytest.mark.proof
def test_type_without_a_node_fails_at_once_and_the_others_end_well(nodes, tmp_path):
    if not nodes.alive("l4"):
        nodes.add("l4")
    journals = Journals(tmp_path, ("t4", "l4"))
    t4, l4 = searched(journals, nodes.address, sleep_s=0.0)
    assert (t4.stopped_by, t4.records) == (StoppedBy.FAILED, ())
    assert "no node of the cluster has 1 t4" in str(t4.failure)
    assert "its nodes offer" in str(t4.failure)
    assert "tuner node-resources" in str(t4.failure)
    assert (l4.stopped_by, l4.failure, len(l4.records)) == (StoppedBy.EXHAUSTED, None, 24)


@pytest.mark.proof
def test_type_of_wrong_nodes_alone_fails_and_the_others_end_well(nodes, tmp_path):
    nodes.add("t4", device="l4")
    journals = Journals(tmp_path, ("l4", "t4"))
    l4, t4 = searched(journals, nodes.address, sleep_s=0.0)
    assert "has NVIDIA L4" in str(t4.failure)
    assert (t4.stopped_by, t4.records) == (StoppedBy.FAILED, ())
    assert (l4.failure, len(l4.records)) == (None, 24)
