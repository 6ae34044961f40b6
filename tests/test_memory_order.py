"""What workloads declare of their knobs and memory is what their predictions say."""

import itertools

import pytest
from encoder_samples import shallow_encoder

from tuner.core.setup.schemas import MEMORY_ORDERS
from tuner.predict.predictor import Predictor
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

ROUNDING = 0.003
"""What the allocator's rounding may take off: 0.2 % in whole spaces
(docs/notebook/guided-search.md)."""

SPACES = {
    "contrastive": ("naics_embedder", "all-minilm-l6-v2"),
    "multitask": ("dynamo_t4", "roberta-base"),
    "causal_lm": ("tiny_cpu", "tiny-llama-3m"),
}
TRIED = {
    "micro_batch": (2, 4),
    "gradient_checkpointing": (True, False),
    "optimizer": ("adamw_torch", "adamw_8bit"),
    "max_length": (64, 128),
    "lora_rank": (8, 16),
}


@pytest.mark.parametrize(
    "workload",
    [pytest.param(w, marks=pytest.mark.proof if w == "contrastive" else ()) for w in SPACES],
)
def test_what_is_larger_in_the_declared_knobs_is_predicted_to_take_as_much(tmp_path, workload):
    assert set(SPACES) == set(MEMORY_ORDERS) - {"command"}  # of which nothing is predicted
    name, model = SPACES[workload]
    path = shallow_encoder(tmp_path, model, layers=2)
    space, order = load_space(name), MEMORY_ORDERS[workload]
    moved = {k: v for k, v in TRIED.items() if k in order.knobs and k in space.knobs}
    chosen = [
        configure(space, dict(zip(moved, values, strict=True)), strict=False)
        for values in itertools.product(*moved.values())
    ]
    found = Predictor(workload, path).predict(chosen, get_gpu("a100_80gb"))
    size = dict(zip(chosen, (p.memory.device_bytes for p in found), strict=True))
    compared = 0
    for small, large in itertools.permutations(chosen, 2):
        (below, others), (above, other) = order.split(small), order.split(large)
        if others == other and all(above[k] >= place for k, place in below.items()):
            compared += 1
            assert size[large] >= (1 - ROUNDING) * size[small], (small, large)
    assert compared > len(chosen)
