"""Timelines for all sizes, from traces of few layers, against traces of all layers."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from compiled_samples import configurations, gpu_for, shallow_model, structures
from numpy.testing import assert_array_equal

from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.cost.as_arrays import to_arrays
from tuner.cost.memory import peak_memory
from tuner.cost.traced import Training
from tuner.predict.compiler import deepening
from tuner.predict.compiler.repetition import Different, _Free, constant_rule, run_rule, shared_rule
from tuner.predict.predict import step_work
from tuner.predict.traces import Subject, Traces, is_sized
from tuner.predict.tracing.trace import trace

LAYERS = 18
SEED = 4471
REPEATED = [2, 2, 3, 4]
TWO_KINDS = [2, 2, 3, 3, 4]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("TUNER_CACHE", "off")


@pytest.fixture
def depths(monkeypatch):
    """The number of layers of each model that is traced."""
    found = []

    def noted(workload, model, configuration, **options):
        found.append(model.get_text_config().num_hidden_layers)
        return trace(workload, model, configuration, **options)

    monkeypatch.setattr(deepening, "trace", noted)
    return found


def drawn(number):
    """Random configurations, each of another structure."""
    source = random.Random(SEED)
    for structure in itertools.islice(structures(SEED), number):
        (configuration,) = configurations(structure, source, window=None, number=1)
        yield configuration, gpu_for(configuration, source)


def require_same(subject, configuration, gpu, *, traces=None, allocated_rel=0):
    """Memory and work to the byte, where sizes are not rounded (to eight tokens, or KiB).

    Where layers of two kinds take turns, what is allocated may be off by `allocated_rel`: masks and
    position embeddings live until the first layer of their kind, which is another one.
    """
    deep = (traces or Traces(subject)).of(configuration, gpu)
    full = Training.of(
        trace(
            subject.workload,
            subject.model_config,
            configuration,
            compute_capability=gpu.compute_capability,
        )
    )
    ours, theirs = (peak_memory(t.course, context_bytes=0) for t in (deep, full))
    about = {"abs": 16384, "rel": allocated_rel}
    assert ours.peak_allocated_bytes == pytest.approx(theirs.peak_allocated_bytes, **about)
    assert ours.peak_reserved_bytes == pytest.approx(theirs.peak_reserved_bytes, rel=1e-3)
    assert ours.phase_peak_bytes == pytest.approx(theirs.phase_peak_bytes, **about)
    assert ours.peak_phase == theirs.peak_phase
    ours, theirs = (executed(each, configuration, gpu) for each in (deep, full))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert (deep.trainable_params, deep.total_params, deep.micro_steps, deep.remarks) == (
        full.trainable_params,
        full.total_params,
        full.micro_steps,
        full.remarks,
    )


def executed(traced, configuration, gpu):
    """What each kind of operator computes and moves in each phase, and the optimizer's in all."""
    work, found = step_work(traced, configuration, gpu), Counter()
    micro_steps = 1 if configuration["grad_accum"] == 1 else 2
    for segment, recomputed, number in np.argwhere(work.executions[: 2 * micro_steps]):
        key = segment, recomputed, work.passes.kinds[number], work.passes.dtypes[number]
        key = *key, *work.passes.shapes[number, :, 0]
        times = int(work.executions[segment, recomputed, number])
        found.update({(*key, "times"): times})
        found.update({(*key, "flops"): times * work.passes.flops[number, 0]})
        found.update({(*key, "bytes"): times * work.passes.bytes_moved[number, 0]})
    moved = work.optimizer_executions @ work.optimizer.bytes_moved[:, 0]
    ran = Counter()
    for number in np.flatnonzero(work.optimizer_executions):
        update = work.optimizer
        key = update.names[number], update.kinds[number], update.dtypes[number]
        ran[key] += int(work.optimizer_executions[number])
    return {**found, **ran, "optimizer": moved}


@pytest.mark.parametrize(("configuration", "gpu"), [*drawn(2)])
def test_a_model_of_equal_layers_is_traced_in_part(tmp_path, depths, configuration, gpu):
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    require_same(subject, configuration, gpu)
    assert depths == REPEATED


def test_the_text_of_a_model_of_images_is_traced_in_part(tmp_path, depths):
    """Its class is another one than that of a model of text alone."""
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-vl-3b", LAYERS))
    ((configuration, gpu),) = drawn(1)
    require_same(subject, configuration, gpu)
    assert depths == REPEATED


def test_what_fails_in_a_model_of_few_layers_is_traced_as_a_whole(tmp_path, monkeypatch, caplog):
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    ((configuration, gpu),) = drawn(1)

    def only_at_full_depth(workload, model, configuration, **options):
        if model.get_text_config().num_hidden_layers != LAYERS:
            raise InputError("this class has no fewer than 18 layers")
        return trace(workload, model, configuration, **options)

    monkeypatch.setattr(deepening, "trace", only_at_full_depth)
    with caplog.at_level("INFO", logger="tuner"):
        require_same(subject, configuration, gpu)
    assert "no fewer than 18 layers" in caplog.text


def test_what_fails_at_full_depth_is_not_hidden(tmp_path, monkeypatch):
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    ((configuration, gpu),) = drawn(1)

    def broken(*_, **__):
        raise RuntimeError("a fault of the trace")

    monkeypatch.setattr(deepening, "trace", broken)
    monkeypatch.setattr("tuner.predict.tracing.trace.trace", broken)
    with pytest.raises(RuntimeError, match="a fault of the trace"):
        Traces(subject).of(configuration, gpu)


SIZES = [
    {"micro_batch": 2, "max_length": 512, "optimizer": "paged_adamw_8bit", "grad_accum": 4},
    {"micro_batch": 3, "max_length": 1000, "optimizer": "adamw_torch", "max_grad_norm": 0.0},
    {"micro_batch": 8, "max_length": 256, "optimizer": "adamw_8bit", "grad_accum": 1},
    {"micro_batch": 2, "max_length": 768, "eval_batch": 8, "grad_accum": 1},
    {"micro_batch": 4, "max_length": 768, "eval_batch": 3, "eval_kept": 2, "grad_accum": 2},
]


@pytest.mark.proof
def test_one_structure_is_traced_once_for_all_sizes_and_optimizers(tmp_path, depths):
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    configuration, gpu = next(each for each in drawn(9) if each[0]["lora_rank"])
    traces = Traces(subject)
    for number, sizes in enumerate(SIZES):
        asked = Configuration({**configuration, **sizes, "lora_rank": 8 + number})
        require_same(subject, asked, gpu, traces=traces)
    assert depths == 3 * REPEATED  # an evaluation that keeps logits has a structure of its own


@pytest.mark.parametrize(
    "rows", [(2, 8), *(pytest.param(rows, marks=pytest.mark.proof) for rows in [(8, 2), (1, 8)])]
)
def test_an_evaluation_may_fill_tiles_that_a_step_does_not(tmp_path, depths, rows):
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    configuration, gpu = next(each for each in drawn(9) if each[0]["lora_rank"])
    sizes = {"micro_batch": rows[0], "eval_batch": rows[1], "max_length": 1500}
    asked = Configuration({**configuration, **sizes, "loss": "chunked"})
    assert is_sized(asked)
    require_same(subject, asked, gpu)
    assert max(depths) == REPEATED[-1]


@pytest.mark.parametrize("model", ["smollm2-360m", "gemma-3-1b", "tinyllama-1.1b", "gpt2"])
def test_the_points_at_which_a_structure_is_traced_are_of_it(model):
    traces = Traces(Subject("causal_lm", model))
    lengths = [n for n in (512, 700, 4097, 5000) if model != "gpt2" or n < 1024]
    sizes = itertools.product(lengths, (1, 2), ("transformers", "chunked"))
    for (configuration, gpu), (length, batch, loss) in itertools.product(drawn(6), sizes):
        more = {"max_length": length, "micro_batch": batch, "loss": loss}
        asked = Configuration({**configuration, **more})
        structure = traces.structure(asked, gpu)
        (first, second), third = structure.probes()
        for probe in (first, second, third):
            assert traces.structure(structure.configuration(probe), gpu) == structure


@pytest.mark.proof
@pytest.mark.parametrize(
    "row",
    [
        {"micro_batch": 1, "max_length": 8192},
        {"micro_batch": 3, "max_length": 800, "padding": "packed"},
    ],
)
def test_one_long_row_is_traced_in_part(tmp_path, depths, row):
    subject = Subject("causal_lm", shallow_model(tmp_path, "smollm2-360m", LAYERS))
    configuration, gpu = next(each for each in drawn(9) if each[0]["lora_rank"])
    changes = {**row, "loss": "chunked", "attention": "sdpa"}
    require_same(subject, Configuration({**configuration, **changes}), gpu)
    assert max(depths) == REPEATED[-1]


def test_an_answer_from_disk_is_the_same(tmp_path, monkeypatch, depths):
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    subject = Subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    ((configuration, gpu),) = drawn(1)
    first, second = (Traces(subject).of(configuration, gpu).course for _ in range(2))
    for name in ("events", "sizes_bytes", "rows"):
        assert_array_equal(getattr(first, name), getattr(second, name))
    assert (first.marks, first.paged_bytes) == (second.marks, second.paged_bytes)
    assert depths == REPEATED


@pytest.mark.proof
def test_random_configurations_are_as_if_all_layers_were_traced(tmp_path, depths):
    subject = Subject("causal_lm", shallow_model(tmp_path, "mistral-7b-v0.1", LAYERS))
    number = 5
    for configuration, gpu in drawn(number):
        require_same(subject, configuration, gpu)
    assert depths.count(REPEATED[-1]) == number


@pytest.mark.proof
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True, "precision": "bf16"}])
def test_layers_of_two_kinds_that_take_turns_are_traced_in_part(depths, changes):
    """Beyond the window, where one kind has a mask and the other none."""
    subject = Subject("causal_lm", "gemma-3-4b-text")
    ((configuration, gpu),) = drawn(1)
    asked = Configuration({**configuration, "attention": "sdpa", "max_length": 1280, **changes})
    require_same(subject, asked, gpu, allocated_rel=1e-3)
    assert {*depths} == {*TWO_KINDS}  # twice where sizes are ambiguous


@pytest.mark.parametrize(
    "model", ["lfm2-1.2b", pytest.param("smollm3-3b", marks=pytest.mark.proof)]
)
def test_a_model_whose_layers_differ_is_traced_as_a_whole(monkeypatch, depths, model):
    """By their parameters, and by a setting that the configuration does not call a kind."""
    monkeypatch.setattr(deepening, "LEAST_LAYERS", (2, 2))
    subject = Subject("causal_lm", model)
    ((configuration, gpu),) = drawn(1)
    structure = Traces(subject).structure(configuration, gpu)
    deepening.sized_timeline(subject.workload, subject.model_config, structure)
    assert depths == 2 * [subject.model_config.get_text_config().num_hidden_layers]


def test_models_of_one_shape_have_one_timeline():
    """Llama 3 and 3.1 differ in what rotates positions, and in fields that train nothing."""
    ((configuration, gpu),) = drawn(1)
    found = []
    for model in ("llama-3-8b", "llama-3.1-8b"):
        subject = Subject("causal_lm", model)
        structure = Traces(subject).structure(configuration, gpu)
        sized = deepening.sized_timeline(subject.workload, subject.model_config, structure)
        found.append((subject.architecture.digest, structure.key, to_arrays(sized)))
    assert found[0][:2] == found[1][:2]
    for name, array in found[0][2].items():
        assert_array_equal(array, found[1][2][name])


def place(rule, more, run):
    _, first, by_run = rule.at(more)
    return first + by_run * run


def test_a_rule_counts_from_the_end_that_stays():
    # All runs free the newest but one.
    assert place(run_rule([_Free(1, 5)], [_Free(1, 6), _Free(1, 5)]), [9], 3) == 1
    # Each run frees the oldest that is left, whatever the depth.
    oldest = run_rule([_Free(7, 2)], [_Free(9, 2), _Free(8, 2)])
    assert (oldest.newest, place(oldest, [9], 3)) == (False, 2)
    # What lies beneath grows with the depth, by two for a layer of one kind, by one for the other.
    grown = shared_rule(_Free(3, 0), [_Free(5, 1), _Free(4, 1)], _Free(6, 3))
    assert (grown.newest, place(grown, [4, 2], 0)) == (True, 13)
    with pytest.raises(Different):
        shared_rule(_Free(3, 0), [_Free(5, 1)], _Free(8, 3))
    # Two kinds whose runs differ: the same place, or none.
    assert place(constant_rule(_Free(4, 1), [_Free(5, 1)], kinds=2), [3, 7], 5) == 1
    with pytest.raises(Different):
        constant_rule(_Free(4, 1), [_Free(5, 2)], kinds=2)
