"""Task heads and a router on a frozen encoder: phases train what they say, and no more."""

import math

import pytest
import torch
from encoder_samples import (
    TINY_ROBERTA,
    assert_compiled_like_traced,
    configuration,
    losses,
    opened,
    parameters_with_gradient,
    shallow_encoder,
)

from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

TASKS = {
    "classification_tasks": ("sentiment",),
    "extraction_tasks": ("qa",),
    "generation_tasks": ("summary", "code"),
    "short_target_tasks": ("summary",),
}
TINY = {
    **TASKS,
    "short_target_length": 4,
    "target_length": 8,
    "max_length": 16,
    "micro_batch": 3,
    "effective_batch": 6,
    "lora_rank": 4,
    "classification_rank": 2,
    "extraction_rank": 3,
    "mixed_precision": "no",
}
DYNAMO = {
    "classification_tasks": ("sentiment",),
    "extraction_tasks": ("qa",),
    "generation_tasks": ("summarization", "code", "translation"),
    "short_target_tasks": ("summarization",),
    "short_target_length": 128,
    "target_length": 256,
    "max_length": 256,
    "lora_rank": 32,
    "classification_rank": 16,
    "extraction_rank": 24,
    "micro_batch": 8,
    "effective_batch": 64,
}
PHASES = ("adapters", "router", "joint")


def tiny(**changes):
    return configuration("multitask", **{**TINY, **changes})


@pytest.mark.proof
@pytest.mark.parametrize(
    ("phase", "backbone"), [("adapters", "frozen"), ("router", "frozen"), ("joint", "adapted")]
)
def test_the_loss_falls(phase, backbone):
    _, session = opened(TINY_ROBERTA, tiny(phase=phase, backbone=backbone), examples=3)
    found = losses(session, steps=30)
    assert all(map(math.isfinite, found))
    # The router can only share out what untrained heads say.
    assert sum(found[-5:]) < (0.999 if phase == "router" else 0.8) * sum(found[:5])


def expected_owners(phase, backbone, tasks):
    owners = {"router"} if phase != "adapters" else set()
    if phase != "router":
        owners |= {f"heads.{task}" for task in tasks}
        owners |= {f"lora {task}" for task in tasks} if backbone == "adapted" else set()
    return owners


def owner(name):
    parts = name.split(".")
    if "lora_A" in parts or "lora_B" in parts:
        return f"lora {parts[-2]}"
    return ".".join(parts[:2]) if parts[0] == "heads" else parts[0]


@pytest.mark.parametrize("backbone", ["frozen", "adapted"])
@pytest.mark.parametrize(
    ("phase", "trained"),
    [("adapters", ("qa",)), ("adapters", ("all",)), ("router", ("all",)), ("joint", ("all",))],
)
def test_gradients_reach_what_the_phase_trains_and_nothing_else(phase, trained, backbone):
    values = tiny(phase=phase, trained_tasks=trained, backbone=backbone)
    _, session = opened(TINY_ROBERTA, values)
    reached = parameters_with_gradient(session)
    trainable = {n for n, p in session.model.named_parameters() if p.requires_grad}
    assert reached == trainable
    tasks = ("sentiment", "qa", "summary", "code") if trained == ("all",) else trained
    assert {owner(name) for name in reached} == expected_owners(phase, backbone, tasks)
    assert session.trainable_params == sum(
        p.numel() for n, p in session.model.named_parameters() if n in reached
    )


def test_an_adapted_encoder_answers_each_task_with_its_own_adapters():
    import torch

    _, session = opened(TINY_ROBERTA, tiny(phase="joint", lora_dropout=0.0))
    model = session.model.eval()
    losses(session, steps=2)
    model.eval()
    tokens, mask = torch.arange(16).view(1, -1), torch.ones(1, 16, dtype=torch.long)
    tasks = {task.name: task for task in model._settings.tasks}
    plain = model._plain(tokens, mask)
    first = model._adapted(tasks["qa"], tokens, mask)
    other = model._adapted(tasks["code"], tokens, mask)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, plain)
    assert torch.equal(first, model._adapted(tasks["qa"], tokens, mask))


def test_parameters_of_five_tasks_on_roberta_base():
    width, wide, vocab = 768, 3072, 50_265
    encoder = 124_645_632
    lora = 12 * (4 * (width + width) + 2 * (width + wide)) * (16 + 24 + 32 + 32 + 32)
    sentiment = (width * 384 + 384) + (384 * 2 + 2)
    qa = width * 2 + 2
    generation = (769 * width + width) + (width * width + width) + (width * vocab + vocab)
    heads = sentiment + qa + 3 * generation
    router = (width * 512 + 512) + (512 * 256 + 256) + (256 * 5 + 5)
    assert (lora, heads, router) == (22_560_768, 119_804_815, 526_341)
    subject, gpu = Subject("multitask", "roberta-base"), get_gpu("t4")
    wanted = {
        ("frozen", "adapters", "code"): generation,
        ("frozen", "router", "all"): router,
        ("frozen", "joint", "all"): heads + router,
    }
    for (backbone, phase, task), trained in wanted.items():
        values = configuration(
            "multitask", **DYNAMO, backbone=backbone, phase=phase, trained_tasks=(task,)
        )
        found = predict(subject, values, gpu)
        assert found.total_params == encoder + lora + heads + router
        assert found.trainable_params == trained


def test_a_phase_that_fits_says_nothing_about_the_next(tmp_path):
    """Each task alone is small; the router's phase holds all logits, twice."""
    model = shallow_encoder(tmp_path, "roberta-base", layers=2)
    subject, gpu = Subject("multitask", model), get_gpu("t4")
    one, router, joint = (
        predict(
            subject,
            configuration(
                "multitask",
                **{**DYNAMO, "micro_batch": 32},
                backbone="frozen",
                phase=phase,
                trained_tasks=("summarization",),
            ),
            gpu,
        )
        for phase in PHASES
    )
    assert one.fits
    assert joint.memory.device_bytes > router.memory.device_bytes > 2 * one.memory.device_bytes
    logits = 32 * (128 + 256 + 256) * 50_265 * 2  # in fp16
    assert router.memory.breakdown["logits_and_loss"] > 2 * logits


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_length": 65}, "64 positions"),
        ({"trained_tasks": ("cod",)}, "cod: no such tasks"),
        ({"short_target_tasks": ("qa",)}, "qa are not generation tasks"),
        ({"generation_tasks": ("qa",), "short_target_tasks": ("none",)}, "named twice: qa"),
        ({"lora_targets": ("q_proj",)}, "q_proj do not exist"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, text):
    with pytest.raises(InputError, match=text):
        opened(TINY_ROBERTA, tiny(**changes))


@pytest.mark.proof
@pytest.mark.parametrize(("phase", "backbone"), [("joint", "frozen"), ("adapters", "adapted")])
def test_compiled_predictions_are_those_of_full_traces(phase, backbone, tmp_path):
    model = shallow_encoder(tmp_path, "roberta-base", layers=4)
    base = {**DYNAMO, **TASKS, "phase": phase, "backbone": backbone, "trained_tasks": ("code",)}
    chosen = [
        configuration("multitask", **{**base, **sizes})
        for sizes in (
            {"micro_batch": 5, "max_length": 200, "lora_rank": 24, "effective_batch": 5},
            {"micro_batch": 16, "max_length": 512},
        )
    ]
    assert_compiled_like_traced("multitask", model, chosen, "t4")


@pytest.mark.parametrize(
    ("loop", "during", "after"), [("frees", 0, 0), ("function", 4, 0), ("loop", 4, 4)]
)
def test_a_loop_holds_the_outputs_of_its_tasks(monkeypatch, loop, during, after):
    _, session = opened(TINY_ROBERTA, tiny(phase="joint", training_loop=loop), examples=3)
    held = []
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd,
        "backward",
        lambda loss: held.append(len(session.model.outputs)) or backward(loss),
    )
    session.micro_step(0)
    assert held == [during]
    assert len(session.model.outputs) == after


def test_outputs_that_are_held_are_paid_for(tmp_path):
    """The logits of every generation task, in fp32 where the router has weighted them."""
    model = shallow_encoder(tmp_path, "roberta-base", layers=2)
    gpu, subject = get_gpu("t4"), Subject("multitask", model)
    peaks = {}
    for loop in ("frees", "function", "loop"):
        knobs = configuration("multitask", **DYNAMO, phase="joint", training_loop=loop)
        peaks[loop] = predict(subject, knobs, gpu).memory.peak_allocated_bytes
    logits = 8 * (128 + 256 + 256) * 50265 * 4
    assert peaks["function"] - peaks["frees"] == pytest.approx(logits, rel=0.05)
    assert peaks["loop"] >= peaks["function"]


@pytest.mark.proof
def test_what_ran_out_of_memory_on_a_t4_does_not_fit_one(tmp_path):
    """32 x 2 at 512 tokens; the encoder is frozen, so that its depth is a matter of weights."""
    model = shallow_encoder(tmp_path, "roberta-base", layers=2)
    gpu, subject = get_gpu("t4"), Subject("multitask", model)
    space = load_space("dynamo_t4")
    ran = {"phase": "joint", "trained_tasks": ("all",), "max_length": 512, "micro_batch": 32}
    knobs = configure(space, {**space.baseline, "max_length": 512, "micro_batch": 32})
    found = predict(subject, Configuration({**knobs, **ran}), gpu)
    assert found.memory.peak_allocated_bytes > gpu.memory_bytes
