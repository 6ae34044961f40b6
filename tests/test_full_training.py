"""Full fine-tuning (lora_rank 0), with the optimizers that transformers' Trainer has."""

import pytest
import torch

from tuner.app.estimate import one_configuration
from tuner.core.records import Phase
from tuner.core.setup.schemas import memory_order
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.predict.tracing.recorder import Recorder
from tuner.space.gpus import get_gpu

MODEL = "tiny-llama-3m"
GPU = get_gpu("a100_80gb")
FULL = {"micro_batch": 2, "max_length": 256, "grad_accum": 2, "lora_rank": 0}
BF16 = {"precision": "bf16", "mixed_precision": "no"}


def configuration(**changes):
    return one_configuration(None, MODEL, {**FULL, **BF16, **changes})[1]


def memory(**changes):
    return predict(Subject("causal_lm", MODEL), configuration(**changes), GPU).memory


def test_an_optimizer_that_needs_shapes_is_traced_in_full():
    adafactor = configuration(optimizer="adafactor")
    found = predict(Subject("causal_lm", MODEL), adafactor, GPU)
    # A row and a column for each matrix: next to nothing beside two numbers for each weight.
    state = found.memory.breakdown["optimizer_state"]
    adamw = memory(optimizer="adamw_torch").breakdown["optimizer_state"]
    assert 0 < state < adamw / 20


def test_trainer_keeps_states_of_embeddings_in_fp32():
    """8 bytes a weight in place of 2, of the embedding alone; loops of one's own ask for none."""
    by_trainer, own = (
        memory(optimizer="adamw_8bit", training_loop=loop).breakdown["optimizer_state"]
        for loop in ("trainer", "function")
    )
    config = Subject("causal_lm", MODEL).model_config
    weights = config.vocab_size * config.hidden_size
    assert by_trainer - own == pytest.approx(6 * weights, rel=0.02)


def test_gradients_of_tied_weights_are_added_in_place():
    """As autograd does it where no mode looks on: no third matrix while two are summed.

    Under autocast: a gradient that is a view of another tensor is not added to.
    """
    weight = torch.nn.Parameter(torch.empty(4096, 64, device="meta"))
    tokens = torch.zeros(8, dtype=torch.long, device="meta")
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        recorder.enter(Phase.FORWARD, 0, 0)
        logits = torch.nn.functional.embedding(tokens, weight).bfloat16() @ weight.bfloat16().t()
        recorder.enter(Phase.BACKWARD, 0, 0)
        logits.sum().backward()
    backward = [b for b in recorder.timeline.blocks if b.born_phase is Phase.BACKWARD]
    assert sum(b.size_bytes == weight.nbytes for b in backward) == 2


def test_a_gradient_that_others_hold_is_not_added_to():
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        first, second = (torch.ones(64, 64, device="meta", requires_grad=True) * 1 for _ in "ab")
        later = second * 1
        recorder.enter(Phase.BACKWARD, 0, 0)
        # The sum's gradient goes to both; the exponential's comes while `later` still waits.
        (torch.exp(first) + (first + later)).sum().backward()
    timeline = recorder.timeline
    in_backward = [op for op in timeline.ops if timeline.marks[op.mark].phase is Phase.BACKWARD]
    assert "add" in {timeline.works[op.work].name for op in in_backward}


def test_full_training_is_not_the_smallest_rank():
    order = memory_order("causal_lm")
    full, adapters = (order.split(configuration(lora_rank=rank)) for rank in (0, 8))
    assert full[1] != adapters[1]
    # Of whole weights 8-bit states are not always less than those of 16 bits: embeddings' are fp32.
    small, large = (
        order.split(configuration(optimizer=name)) for name in ("adamw_8bit", "adamw_torch")
    )
    assert small[1] != large[1]
