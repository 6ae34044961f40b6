"""Traces of few layers, repeated to full depth, against traces of all layers."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from compiled_samples import configurations, gpu_for, shallow_model, structures

from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.cost.memory import peak_memory
from tuner.predict.compiler import deepening
from tuner.predict.compiler.alignment import (
    Different,
    Free,
    constant_rule,
    run_rule,
    shared_rule,
)
from tuner.predict.compiler.deepening import trace_deep
from tuner.predict.predict import resolve_subject
from tuner.predict.tracing.trace import trace

LAYERS = 18
SEED = 4471
REPEATED = [2, 3, 4]
TWO_KINDS = [2, 3, 3, 4]


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


def require_same(subject, configuration, gpu, allocated_rel=0):
    """Memory to a few KiB (buffers that hold a number of each layer), work to the byte.

    Where layers of two kinds take turns, what is allocated may be off by `allocated_rel`: masks and
    position embeddings live until the first layer of their kind, which is another one.
    """
    deep, full = (
        find(
            subject.workload,
            subject.model_config,
            configuration,
            compute_capability=gpu.compute_capability,
        )
        for find in (trace_deep, trace)
    )
    ours, theirs = (peak_memory(t.timeline, context_bytes=0) for t in (deep, full))
    about = {"abs": 16384, "rel": allocated_rel}
    assert ours.peak_allocated_bytes == pytest.approx(theirs.peak_allocated_bytes, **about)
    assert ours.peak_reserved_bytes == pytest.approx(theirs.peak_reserved_bytes, rel=1e-3)
    assert ours.phase_peak_bytes == pytest.approx(theirs.phase_peak_bytes, **about)
    assert ours.peak_phase == theirs.peak_phase
    assert executed(deep) == executed(full)
    assert (deep.trainable_params, deep.total_params, deep.micro_steps, deep.remarks) == (
        full.trainable_params,
        full.total_params,
        full.micro_steps,
        full.remarks,
    )


def executed(traced):
    """What each kind of operator computes and moves in each phase."""
    found = Counter()
    for op in traced.timeline.ops:
        work = traced.timeline.works[op.work]
        key = op.mark, op.recompute, work.kind, work.dtype, work.shape
        found.update({(*key, "times"): 1, (*key, "flops"): work.flops})
        found.update({(*key, "bytes"): work.bytes_moved})
    return found


@pytest.mark.parametrize(("configuration", "gpu"), [*drawn(2)])
def test_a_model_of_equal_layers_is_traced_in_part(tmp_path, depths, configuration, gpu):
    subject = resolve_subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    require_same(subject, configuration, gpu)
    assert depths == REPEATED


def test_the_text_of_a_model_of_images_is_traced_in_part(tmp_path, depths):
    """Its class is another one than that of a model of text alone."""
    subject = resolve_subject("causal_lm", shallow_model(tmp_path, "qwen2.5-vl-3b", LAYERS))
    ((configuration, gpu),) = drawn(1)
    require_same(subject, configuration, gpu)
    assert depths == REPEATED


def test_what_fails_in_a_model_of_few_layers_is_traced_as_a_whole(tmp_path, monkeypatch, caplog):
    subject = resolve_subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
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
    subject = resolve_subject("causal_lm", shallow_model(tmp_path, "qwen2.5-1.5b", LAYERS))
    ((configuration, _),) = drawn(1)

    def broken(*_, **__):
        raise RuntimeError("a fault of the trace")

    monkeypatch.setattr(deepening, "trace", broken)
    with pytest.raises(RuntimeError, match="a fault of the trace"):
        trace_deep(subject.workload, subject.model_config, configuration, compute_capability=(8, 0))


@pytest.mark.proof
def test_random_configurations_are_as_if_all_layers_were_traced(tmp_path, depths):
    subject = resolve_subject("causal_lm", shallow_model(tmp_path, "mistral-7b-v0.1", LAYERS))
    number = 5
    for configuration, gpu in drawn(number):
        require_same(subject, configuration, gpu)
    assert depths.count(REPEATED[-1]) == number
    assert depths.count(LAYERS) <= 1  # one of them frees blocks in an order that is not recognised


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True, "precision": "bf16"}])
def test_layers_of_two_kinds_that_take_turns_are_traced_in_part(depths, changes):
    """Beyond the window, where one kind has a mask and the other none."""
    subject = resolve_subject("causal_lm", "gemma-3-4b-text")
    ((configuration, gpu),) = drawn(1)
    asked = Configuration({**configuration, "attention": "sdpa", "max_length": 1280, **changes})
    require_same(subject, asked, gpu, allocated_rel=1e-3)
    assert depths == TWO_KINDS


@pytest.mark.parametrize("model", ["lfm2-1.2b", "smollm3-3b"])
def test_a_model_whose_layers_differ_is_traced_as_a_whole(monkeypatch, depths, model):
    """By their parameters, and by a setting that the configuration does not call a kind."""
    monkeypatch.setattr(deepening, "LEAST_LAYERS", (2, 2))
    subject = resolve_subject("causal_lm", model)
    ((configuration, _),) = drawn(1)
    trace_deep(subject.workload, subject.model_config, configuration, compute_capability=(8, 0))
    assert depths == [subject.model_config.get_text_config().num_hidden_layers]


def test_a_rule_counts_from_the_end_that_stays():
    # All runs free the newest but one.
    assert run_rule([Free(1, 5)], [Free(1, 6), Free(1, 5)]).place([9], 3) == 1
    # Each run frees the oldest that is left, whatever the depth.
    oldest = run_rule([Free(7, 2)], [Free(9, 2), Free(8, 2)])
    assert (oldest.newest, oldest.place([9], 3)) == (False, 2)
    # What lies beneath grows with the depth, by two for a layer of one kind, by one for the other.
    grown = shared_rule(Free(3, 0), [Free(5, 1), Free(4, 1)], Free(6, 3))
    assert (grown.newest, grown.place([4, 2], 0)) == (True, 13)
    with pytest.raises(Different):
        shared_rule(Free(3, 0), [Free(5, 1)], Free(8, 3))
    # Two kinds whose runs differ: the same place, or none.
    assert constant_rule(Free(4, 1), [Free(5, 1)], kinds=2).place([3, 7], 5) == 1
    with pytest.raises(Different):
        constant_rule(Free(4, 1), [Free(5, 2)], kinds=2)
