"""Trials on real weights: from a folder, quantised while they are read; no network, no code."""

import json

import pytest
import torch
from measure_samples import SHAPE, knobs, model_folder
from transformers import AutoModelForCausalLM, LlamaConfig

from tuner.core.errors import InputError
from tuner.predict.training import get_workload
from tuner.trial.device import RealEnvironment, open_session

LLAMA = LlamaConfig(**SHAPE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(folder)
    return folder


def opened(folder, config=LLAMA, **changes):
    environment = RealEnvironment("cpu", checkpoint=str(folder))
    return open_session(get_workload("causal_lm"), config, knobs(**changes), environment)


def saved(folder):
    return AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.gate_proj.weight


def gate(session):
    return session.model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_weights_are_those_of_the_checkpoint(checkpoint, precision, dtype):
    session = opened(checkpoint, precision=precision)
    assert gate(session).weight.dtype is dtype
    assert torch.equal(gate(session).weight, saved(checkpoint).to(dtype))
    session.optimizer_step(1)
    assert float(session.loss) > 0


@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_quantised_weights_stand_for_those_of_the_checkpoint(checkpoint, precision):
    session = opened(checkpoint, precision=precision, mixed_precision="bf16")
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    expected = x.float() @ saved(checkpoint).T
    error = (gate(session)(x).float() - expected).norm() / expected.norm()
    assert error < (0.15 if precision == "nf4" else 0.03)
    session.optimizer_step(1)
    assert session.trainable_params == 2 * 8 * ((64 + 64) + (64 + 32))


def test_real_and_synthetic_sessions_have_the_same_tensors(checkpoint):
    """So that synthetic weights measure what real ones would."""
    for precision in ("fp32", "bf16", "nf4", "int8"):
        changes = {"precision": precision, "mixed_precision": "bf16"}
        real = opened(checkpoint, **changes)
        made = open_session(
            get_workload("causal_lm"), LLAMA, knobs(**changes), RealEnvironment("cpu")
        )
        found, expected = (
            {n: (p.shape, p.dtype, p.requires_grad) for n, p in s.model.named_parameters()}
            for s in (real, made)
        )
        assert found == expected


def test_a_checkpoint_of_another_model_is_refused(checkpoint):
    other = LlamaConfig(**{**SHAPE, "num_hidden_layers": 3})
    with pytest.raises(InputError, match="num_hidden_layers is 2, not 3"):
        opened(checkpoint, other)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"weights of .* cannot be read"):
        opened(model_folder(tmp_path))
    with pytest.raises(InputError):
        opened(tmp_path / "nowhere")


def test_code_of_a_checkpoint_is_never_run(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config["model_type"] = "of_its_own"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(InputError, match="its own code"):
        opened(tmp_path)
