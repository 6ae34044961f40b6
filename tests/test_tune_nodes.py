"""Mixed searches on a real Ray cluster of several nodes, which are killed and added meanwhile."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from shared_cases.chaos import ChaosNode, Journals, chaos_cluster, gate_of

TYPES = ("a6000", "l4", "h100_sxm")


@pytest.mark.proof
def test_three_true_fronts_while_nodes_are_killed_frozen_removed_and_added(tmp_path):
    journals = Journals(tmp_path, TYPES)
    added: dict[str, ChaosNode] = {}

    with chaos_cluster() as nodes, ThreadPoolExecutor(1) as pool:
        doomed, broken = nodes.add("a6000"), nodes.add("a6000")
        leaving, silent = nodes.add("l4"), nodes.add("h100_sxm")
        nodes.add("h100_sxm", device="l4")  # a wrong label

        def events() -> None:
            """Trials from the tenth of each type on are held until these have happened."""
            for gpu_id in TYPES:
                journals.wait_for(gpu_id, 3)
            doomed.signal(signal.SIGKILL)
            journals.wait_for("a6000", 6)  # goes on with the other one
            silent.signal(signal.SIGSTOP)  # as behind a broken network
            added["h100_sxm"] = nodes.add("h100_sxm")
            nodes.wait_until_dead(silent)
            gate_of(tmp_path, "h100_sxm").touch()
            journals.wait_for("h100_sxm", 12)
            added["l4"] = nodes.add("l4")
            nodes.remove(leaving)
            gate_of(tmp_path, "l4").touch()
            journals.wait_for("l4", 12)
            added["a6000"] = nodes.add("a6000")
            broken.lost_file.touch()
            gate_of(tmp_path, "a6000").touch()
            journals.wait_for("a6000", 12)

        happened = pool.submit(events)
        # What fails there holds no trial for ever.
        happened.add_done_callback(lambda _: [gate_of(tmp_path, one).touch() for one in TYPES])
        results = journals.search(nodes.cluster.address, held_from=10)
        happened.result()
    journals.check_end(results)
    a6000, l4, h100 = results
    assert ("GPU is lost" in " ".join(a6000.warnings), l4.warnings) == (True, ())
    assert "has NVIDIA L4" in " ".join(h100.warnings)
    # What was added was used, and what was under way at an event ran once more.
    for gpu_id, node in added.items():
        assert node.name in journals.begun(gpu_id)
        assert len(journals.begun(gpu_id)) <= 24 + 3
