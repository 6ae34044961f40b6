"""One real trial on the processor: what it says, what it reports, when it ends."""

import pytest
from measure_samples import job, knobs, model_folder, quick

from tuner.core.errors import InputError
from tuner.core.host import cpu_name
from tuner.core.records import Measurement, Phase
from tuner.predict.training.causal_lm import CausalLMSession
from tuner.space import DataFacts, TokenLengths
from tuner.trial.measure import measure

LENGTHS = TokenLengths(10.0, 20, ((0.0, 0.0), (20.0, 1.0)))  # even between 0 and 20 tokens


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def measured(model, options=None, data=None, **changes):
    facts = {}
    found = measure(job(model, data=data), knobs(**changes), options or quick(), facts.update)
    return found, facts


def test_a_trial_says_what_it_took(model):
    found, facts = measured(model)
    assert found.device == cpu_name()
    assert found.steps == 3
    assert found.warmup_steps == 2
    assert found.stopped_by in ("budget", "interval")
    assert found.loss_finite
    assert found.trainable_params == 2 * 8 * ((64 + 64) + (64 + 32))
    speed = found.speed
    assert speed.it_per_s == pytest.approx(2 / speed.step_s)
    assert speed.samples_per_s == pytest.approx(4 / speed.step_s)
    assert speed.tokens_per_s == pytest.approx(4 * 32 / speed.step_s)
    assert found.padded_tokens_per_s == pytest.approx(speed.tokens_per_s)
    low, high = found.samples_per_s_interval or (0, 1e9)
    assert low < speed.samples_per_s < high
    assert 0 <= found.data_wait_fraction < 1
    assert found.first_step_s > 0
    assert found.load_s > 0
    assert set(found.memory.phase_peak_bytes) == set(Phase) - {Phase.GENERATE, Phase.EVALUATION}
    assert found.memory.device_bytes == found.memory.peak_reserved_bytes
    assert found.memory.peak_allocated_bytes >= max(found.memory.phase_peak_bytes.values())
    assert facts["phase"] is None  # of a process that dies now it is not known
    assert facts["phase_peak_bytes"] == found.memory.phase_peak_bytes
    assert facts["trainable_params"] == found.trainable_params


def test_measurements_of_older_journals_can_be_read(model):
    found, _ = measured(model)
    old = found.to_dict()
    for name in ("load_s", "samples_per_s_interval", "notes", "data_wait_fraction", "weights"):
        del old[name]
    read = Measurement.from_dict(old)
    assert read.memory == found.memory
    assert read.speed == found.speed
    assert read.samples_per_s_interval is None
    assert read.notes == ()
    with pytest.raises(ValueError, match="missing required field loss_finite"):
        Measurement.from_dict({k: v for k, v in old.items() if k != "loss_finite"})


def test_a_spent_budget_ends_the_steps_but_not_before_the_third(model):
    found, _ = measured(model, quick(relative_error=0.0, budget_s=0.0))
    assert (found.steps, found.stopped_by) == (3, "budget")
    found, _ = measured(model, quick(relative_error=0.0, budget_s=0.0, min_steps=5))
    assert found.steps == 5


def test_a_loss_that_is_not_a_number_is_said(model, monkeypatch):
    backward = CausalLMSession._backward
    calls = []

    def diverges(self, loss):
        calls.append(loss)
        backward(self, loss * (float("nan") if len(calls) > 6 else 1.0))

    monkeypatch.setattr(CausalLMSession, "_backward", diverges)
    found, _ = measured(model)
    assert not found.loss_finite
    assert found.stopped_by == "loss"
    assert found.steps == 2  # the second timed step had it


def test_what_goes_wrong_is_raised_with_its_phase_reported(model, monkeypatch):
    def fails(self, loss):
        raise RuntimeError("no more of it")

    monkeypatch.setattr(CausalLMSession, "_backward", fails)
    facts = {}
    with pytest.raises(RuntimeError, match="no more"):
        measure(job(model), knobs(), quick(), facts.update)
    assert facts["phase"] == "backward"
    assert "forward" in facts["phase_peak_bytes"]
    assert facts["loaded_bytes"] is not None


def test_lengths_of_the_data_pad_and_still_peak_at_the_longest(model):
    data = DataFacts(examples=1000, token_lengths=LENGTHS, padding="longest")
    found, _ = measured(model, quick(lengths="data"), data)
    full, _ = measured(model)
    assert found.lengths == "data"
    assert found.speed.tokens_per_s < found.padded_tokens_per_s
    share = found.speed.tokens_per_s / found.padded_tokens_per_s
    assert 0.5 < share < 1  # of two lengths between 0 and 20, the shorter is padded to the longer
    assert full.speed.tokens_per_s == full.padded_tokens_per_s


def test_mean_and_maximum_are_no_lengths_to_draw_from(model):
    data = DataFacts(token_lengths=TokenLengths(10.0, 20))
    with pytest.raises(InputError, match="quantiles or a histogram"):
        measured(model, quick(lengths="data"), data)


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 0}, {"gradient_checkpointing": False}], ids=str
)
def test_model_flops_are_those_of_a_prediction(changes):
    """The measurement counts layers, the prediction the operators of a trace."""
    from estimate_samples import configuration, tiny_config

    from tuner.predict.predict import predict
    from tuner.predict.traces import Subject
    from tuner.predict.training import get_workload
    from tuner.space.gpus import get_gpu
    from tuner.trial.device import RealEnvironment, open_session

    # Long enough for the layers to outweigh the first one's missing gradients.
    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = tiny_config(**sizes)
    values = configuration(grad_accum=1, max_length=128, **changes)
    gpu, workload = get_gpu("a6000"), get_workload("causal_lm")
    speed = predict(Subject(workload, "tiny", config), values, gpu).speed
    session = open_session(workload, config, values, RealEnvironment("cpu"))
    session.optimizer_step(1)
    predicted = speed.mfu * speed.step_s * gpu.flops["bf16"]
    assert session.counts.model_flops == pytest.approx(predicted, rel=0.06)


def test_a_checkpoint_is_asked_for_by_hub_id(model):
    from tuner.trial.measure import _checkpoint

    assert _checkpoint(job("qwen2.5-0.5b"), quick()) is None
    assert _checkpoint(job("qwen2.5-0.5b"), quick(weights="hub")) == "Qwen/Qwen2.5-0.5B"
    assert _checkpoint(job(model), quick(weights="hub")) == model
    assert _checkpoint(job(model), quick(weights="some/folder")) == "some/folder"
