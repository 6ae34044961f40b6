"""The cause of a surprise, in the short answer."""

from dataclasses import replace

import pytest
from results_samples import make_memory

from tuner.app.cause import cause_of
from tuner.core.units import GIB

MOE, DENSE = "qwen3-30b-a3b", "qwen3-8b"


@pytest.mark.parametrize(
    ("parts", "settings", "model", "said"),
    [
        ({"weights": 8}, {"precision": "nf4"}, MOE, "weights 8.00 of 10.0 GiB: bitsandbytes"),
        ({"weights": 8}, {"precision": "nf4"}, DENSE, ""),
        ({"weights": 8}, {"precision": "bf16"}, MOE, ""),
        ({"weights": 8}, {"precision": "fp32"}, DENSE, "weights 8.00 of 10.0 GiB: loaded"),
        ({"weights": 3, "logits_and_loss": 5}, {"precision": "fp32"}, DENSE, "logits and loss"),
        ({"activations": 8}, {}, "", ""),
        ({"weights": 8}, {"precision": "nf4"}, "no/such-model", ""),
    ],
)  # fmt: skip
def test_a_part_that_is_most_of_the_memory_is_explained(parts, settings, model, said):
    breakdown = {name: size * GIB for name, size in parts.items()}
    memory = replace(make_memory(10 * GIB), breakdown=breakdown)
    found = cause_of(memory, settings, model)
    assert found.startswith(said)
    assert bool(found) == bool(said)
