"""Classifiers of texts: which class is trained, with which labels, and what does not go with it."""

import pytest
import transformers

from tuner.app.estimate import one_configuration
from tuner.core.errors import InputError
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.space.models.trainable import require_trained
from tuner.trial.device import RealEnvironment, open_session

GPU = get_gpu("rtx3060")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 4}
DECODER = transformers.LlamaConfig(**SIZES, **HEADS, architectures=["LlamaForCausalLM"])
ENCODER = transformers.BertConfig(
    **SIZES, **HEADS, id2label={0: "no", 1: "so", 2: "yes"},
    architectures=["BertForSequenceClassification"],
)  # fmt: skip


def opened(config, folder, **settings):
    config.save_pretrained(folder)
    asked = {"max_length": 64, "grad_accum": 1, "micro_batch": 4, "lora_rank": 4, **settings}
    space, configuration = one_configuration(None, str(folder), asked)
    return space, configuration, str(folder)


def predicted(config, folder, **settings):
    space, configuration, model = opened(config, folder, **settings)
    return predict(Subject(space.workload, model), configuration, GPU)


def test_a_classifier_is_trained_with_the_labels_of_its_checkpoint(tmp_path):
    _, configuration, _ = opened(ENCODER, tmp_path)
    assert configuration["num_labels"] == 3
    whole = predicted(ENCODER, tmp_path, lora_rank=0, precision="fp32")
    real = transformers.BertForSequenceClassification(ENCODER)
    assert whole.trainable_params == sum(p.numel() for p in real.parameters())


def test_the_head_is_trained_beside_adapters_and_has_no_logits_of_tokens(tmp_path):
    few = predicted(DECODER, tmp_path, num_labels=2)
    more = predicted(DECODER, tmp_path, num_labels=7)
    assert more.trainable_params - few.trainable_params == 5 * 64
    language = predicted(DECODER, tmp_path)
    assert few.memory.peak_allocated_bytes < language.memory.peak_allocated_bytes


@pytest.mark.parametrize(("config", "labels"), [(ENCODER, 3), (DECODER, 1)])
def test_a_real_step_trains_the_head(tmp_path, config, labels):
    space, configuration, model = opened(config, tmp_path, num_labels=labels, precision="fp32")
    workload = Subject(space.workload, model).workload
    session = open_session(workload, config, configuration, RealEnvironment("cpu"))
    session.optimizer_step(1)
    heads = {"classifier", "score"}
    named = [(n.split("."), p) for n, p in session.model.named_parameters() if p.requires_grad]
    [trained] = [p for parts, p in named if parts[-1] == "weight" and heads & set(parts)]
    assert trained.shape == (labels, 64)
    assert float(session.loss) > 0


@pytest.mark.parametrize(
    "knob", [{"images": 1}, {"loss": "chunked"}, {"fused_loss": True}, {"reference_pass": True}]
)
def test_what_only_language_models_have_is_refused(tmp_path, knob):
    with pytest.raises(InputError, match=f"{next(iter(knob))} .* does not go with num_labels 2"):
        predicted(DECODER, tmp_path, num_labels=2, **knob)


@pytest.mark.parametrize("kind", [transformers.BartConfig, transformers.WhisperConfig])
def test_encoder_decoders_are_refused_with_the_command_that_answers(kind):
    for labels in (0, 2):
        with pytest.raises(InputError) as caught:
            require_trained(kind(), num_labels=labels)
        assert "tuner emulate --gpu rtx4090 -- python train.py" in str(caught.value.hint)


def test_what_could_be_a_classifier_says_how():
    with pytest.raises(InputError) as caught:
        require_trained(ENCODER)
    assert "set num_labels to 1 or more" in str(caught.value.hint)
