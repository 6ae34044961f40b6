"""Tiny encoders, sessions around them, and comparisons of their two kinds of prediction."""

import json
from pathlib import Path
from typing import Any

import torch
from compiled_samples import differences, shallow_model
from transformers import BertConfig, RobertaConfig

from tuner.core.records import Configuration
from tuner.predict.predict import predict
from tuner.predict.predictor import Predictor
from tuner.predict.traces import Subject
from tuner.predict.training import get_workload
from tuner.space.data import DataFacts
from tuner.space.gpus import get_gpu
from tuner.space.searchspace import SearchSpace, complete_space
from tuner.trial.device import RealEnvironment, open_session

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
TINY_BERT = BertConfig(**_SHAPE, max_position_embeddings=64)
TINY_ROBERTA = RobertaConfig(**_SHAPE, max_position_embeddings=66)

PHASES = """\
name: phases
workload: multitask
model: ./tiny-roberta
knobs: {micro_batch: [2, 4]}
fixed:
  effective_batch: 4
  backbone: frozen
  max_length: 32
  generation_tasks: [summary]
  target_length: 16
  mixed_precision: "no"
  optimizer: adamw_torch
stages:
  - {name: first, set: {phase: adapters, trained_tasks: [summary]}, examples: 100}
  - {name: second, set: {phase: joint}, examples: 50, epochs: 4}
"""

ALLOWED = {"peak_allocated": 0.005, "step_s": 0.005, "loaded": 0.005, "backward_peak": 0.005}
RESTS_BYTES = 4 * 2**20
"""What rests inside of a few blocks may add: they depend on the step before, which compiled
timelines do not replay. Of a peak below 800 MiB it is more than half a percent."""


def configuration(workload: str, **values: Any) -> Configuration:
    """A complete configuration with these values, the vocabulary's defaults for the rest."""
    space = complete_space(SearchSpace(name="sample", workload=workload, fixed=values))
    return Configuration(space.complete(space.fixed))


def opened(config: Any, values: Configuration, *, examples: int | None = None) -> Any:
    """Environment and session on the processor; with `examples`, so many repeat."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = DataFacts(examples=examples) if examples else None
    environment = RealEnvironment("cpu", data=data)
    name = "contrastive" if "channels" in values else "multitask"
    return environment, open_session(get_workload(name), config, values, environment)


def losses(session: Any, *, steps: int) -> list[float]:
    """The loss of each step, with a learning rate that suits a tiny model."""
    for group in session.optimizer.param_groups:
        group["lr"] = 3e-3
    found = []
    for _ in range(steps):
        session.optimizer_step(1)
        found.append(float(session.loss))
    return found


def parameters_with_gradient(session: Any) -> set[str]:
    """Names of the parameters that one backward pass gives a gradient."""
    session.micro_step(0)
    return {name for name, p in session.model.named_parameters() if p.grad is not None}


def shallow_encoder(folder: Path, name: str, *, layers: int) -> str:
    """A catalogue encoder with fewer layers."""
    path = Path(shallow_model(folder, name, layers))
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == layers
    return str(path)


def assert_compiled_like_traced(
    workload: str, model: str, chosen: list[Configuration], gpu_name: str
) -> None:
    """Compiled predictions must exist and differ from full traces by less than `ALLOWED`."""
    gpu, subject = get_gpu(gpu_name), Subject(workload, model)
    for ours, values in zip(Predictor(workload, model).predict(chosen, gpu), chosen, strict=True):
        full = predict(subject, values, gpu)
        apart = differences(ours, full)
        rests = RESTS_BYTES / full.memory.peak_allocated_bytes
        allowed = {n: limit if n == "step_s" else max(limit, rests) for n, limit in ALLOWED.items()}
        wrong = {name: apart[name] for name, limit in allowed.items() if apart[name] > limit}
        assert not wrong, values.to_dict()
        assert (ours.trainable_params, ours.total_params) == (
            full.trainable_params,
            full.total_params,
        )
