"""Images in the batches of `causal_lm`: how many tokens they take, and who does not take them."""

import pytest
import torch
import transformers

from tuner.app.estimate import one_configuration
from tuner.core.errors import InputError
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.predict.training.images import images_of
from tuner.predict.training.known_values import KnownValues
from tuner.space.gpus import get_gpu

GPU = get_gpu("a100_80gb")
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
IDS = {
    "image_token_id": 600,
    "video_token_id": 601,
    "vision_start_token_id": 602,
    "vision_end_token_id": 603,
}


def qwen():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=QWEN_VISION,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **IDS,
    )


def llava():
    clip = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
    }
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config=clip,
        image_token_index=600,
        architectures=["LlavaForConditionalGeneration"],
    )


def skeleton(config):
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(config)


def found(config, *, number=1, size=0):
    return images_of(skeleton(config), config, number=number, size=size)


@pytest.fixture
def folder(tmp_path):
    def write(config):
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return write


def predicted(model, **settings):
    asked = {"max_length": 256, "grad_accum": 2, "micro_batch": 2, "lora_rank": 8, **settings}
    space, configuration = one_configuration(None, model, asked)
    return predict(Subject(space.workload, model), configuration, GPU)


# -- values of tensors without data ----------------------------------------------------------


def test_what_follows_from_known_values_is_known():
    with KnownValues() as known:
        ids = torch.tensor([[5, 7, 7, 3]]).to("meta")
        mask = ids == 7
        assert mask.sum().item() == 2
        assert mask.nonzero().shape == (2, 2)
        assert ids.tolist() == [[5, 7, 7, 3]]
        hidden = torch.empty(1, 4, 8, device="meta")
        assert hidden[mask].shape == (2, 8)
        counts = torch.tensor([2, 3], device="meta")
        assert torch.repeat_interleave(counts).shape == (5,)
        assert known.of(torch.rand(3, device="meta")) is None


def test_what_something_unknown_was_written_into_is_not_known():
    with KnownValues() as known:
        ids = torch.tensor([1, 2, 3]).to("meta")
        row = ids[1:]
        row.copy_(torch.randint(5, (2,), device="meta"))
        assert known.of(ids) is None


# -- images ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "size", "tokens"), [(1, 56, 4), (1, 112, 16), (2, 112, 32)])
def test_tokens_follow_from_size_where_any_is_taken(number, size, tokens):
    images = found(qwen(), number=number, size=size)
    assert images.tokens == tokens
    assert images.shapes["pixel_values"] == (4 * tokens, 3 * 2 * 14 * 14)
    assert images.type_ids == ("mm_token_type_ids",)


def test_tokens_of_a_tower_of_one_size():
    images = found(llava(), number=3)
    assert images.tokens == 3 * 16
    assert images.shapes["pixel_values"] == (3, 3, 56, 56)
    with pytest.raises(
        InputError, match="image_size 112 is not what this model takes: its clip_vision_model"
    ):
        found(llava(), size=112)


def test_a_batch_has_the_tokens_that_the_model_looks_for():
    images = found(qwen(), size=112)
    ids = torch.arange(590, 640).repeat(2, 1)
    placed = images.placed({"input_ids": ids, "labels": ids.clone()})
    assert (placed["input_ids"] == 600).sum().item() == 2 * images.tokens
    assert not any((placed["input_ids"] == special).any() for special in (601, 602, 603))
    assert (placed["labels"] == -100).sum().item() == 2 * images.tokens
    assert placed["mm_token_type_ids"].sum().item() == 2 * images.tokens


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"images": 1}, "image_size is not set"),
        ({"image_size": 112}, "image_size 112 has no effect without images"),
        ({"images": 1, "image_size": 448}, "has no room for text beside 256 tokens"),
    ],
)
def test_what_cannot_be_is_refused(folder, settings, said):
    with pytest.raises(InputError, match=said):
        predicted(folder(qwen()), **settings)


def mllama():
    return transformers.MllamaConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 56,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192,
        },
        image_token_index=600,
        architectures=["MllamaForConditionalGeneration"],
    )


def minicpm():
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return transformers.MiniCPMV4_6Config(
        text_config={"model_type": "qwen3", **TEXT},
        vision_config={**tower, "num_hidden_layers": 2, "patch_size": 14},
        insert_layer_id=0,
        image_token_id=600,
        architectures=["MiniCPMV4_6ForConditionalGeneration"],
    )


def molmo():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    widths = {"hidden_size": 64, "intermediate_size": 128, **heads}
    return transformers.Molmo2Config(
        text_config={**TEXT, "head_dim": 16},
        vision_config={**widths, "num_hidden_layers": 2, "image_size": [70, 70]},
        adapter_config={**widths, "text_hidden_size": 64, "vision_feature_layer": [1, 0]},
        image_patch_id=600,
        architectures=["Molmo2ForConditionalGeneration"],
    )


def two_towers():
    clip = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    low = {"model_type": "siglip_vision_model", **clip, "image_size": 64, "patch_size": 16}
    high = {"model_type": "sam_vision_model", "hidden_size": 64, "num_hidden_layers": 2}
    return transformers.DeepseekVLHybridConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**low, "num_hidden_layers": 2},
        high_res_vision_config={
            **high,
            "num_attention_heads": 4,
            "image_size": 128,
            "output_channels": 32,
            "global_attn_indexes": [1],
        },
        image_token_id=600,
        architectures=["DeepseekVLHybridForConditionalGeneration"],
    )


def qwen3():
    heads = {"num_heads": 4, "depth": 2, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    return transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": {**rope, "rope_theta": 1e4}},
        vision_config={**heads, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64},
        image_token_id=600,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


@pytest.mark.parametrize(
    ("config", "size", "tokens"),
    [(mllama, 0, 2), (minicpm, 112, 8), (molmo, 0, 36), (two_towers, 0, 32), (qwen3, 128, 32)],
)
def test_a_real_model_takes_the_batch_that_is_predicted(config, size, tokens):
    images = found(config(), number=2, size=size)
    model = transformers.AutoModelForImageTextToText.from_config(config())
    ids = torch.zeros((3, tokens + 20), dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    batch = {**images.placed(batch), **images.fields(3, "cpu")}
    # The models themselves compare their images with the tokens of them.
    model(**batch, use_cache=False).loss.backward()
    assert images.tokens == tokens
    tower = [p for n, p in model.named_parameters() if "vis" in n]
    assert any(p.grad is not None for p in tower)


def test_a_size_that_a_tower_does_not_take_is_refused(folder):
    with pytest.raises(InputError, match="tower sees images of 56"):
        predicted(folder(mllama()), images=1, image_size=112)


def test_types_whose_images_are_not_known_are_refused_by_name(folder):
    config = transformers.Kosmos2Config(architectures=["Kosmos2ForConditionalGeneration"])
    with pytest.raises(InputError, match="images are not predicted for kosmos-2 models"):
        predicted(folder(config), images=1)
