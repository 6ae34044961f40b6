"""Hollow checkpoints: from_pretrained finds every weight and no other, and no disk is taken."""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open

from tuner.app.cli.main import run
from tuner.core import sparse
from tuner.core.errors import InputError, UnavailableError
from tuner.space.models import hollow
from tuner.space.models.catalogue import load_catalogue, resolve_config
from tuner.space.models.hollow import is_hollow, write_hollow
from tuner.space.models.hollow_tokenizer import make_tokenizer, special_tokens

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 600,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
ENCODER = {"num_key_value_heads": None, "max_position_embeddings": 66, "dtype": "float32"}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
}
TEXT = SMALL
TINY = {
    "llama": SMALL,
    "llama, tied": {**SMALL, "tie_word_embeddings": True},
    "qwen3": SMALL,
    "qwen3_moe": {**SMALL, **EXPERTS, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "mixtral": {**SMALL, **EXPERTS},
    "gpt_oss": {**SMALL, **EXPERTS},
    "gemma3_text": {**SMALL, "tie_word_embeddings": True, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 600, "eos_token_id": 599},
    "bert": {**SMALL, **ENCODER, "architectures": ["BertForMaskedLM"]},
    "roberta": {
        **SMALL,
        **ENCODER,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "architectures": ["RobertaForMaskedLM"],
    },
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text"},
        "vision_config": {**VISION, "image_size": 28, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "boi_token_index": 590,
        "eoi_token_index": 591,
        "image_token_index": 592,
        "dtype": "bfloat16",
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": 590,
        "video_token_id": 591,
        "vision_start_token_id": 592,
        "vision_end_token_id": 593,
        "dtype": "bfloat16",
    },
    "whisper": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "vocab_size": 600,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "architectures": ["WhisperForConditionalGeneration"],
    },
}


def model_folder(folder, name, **changes):
    fields = {"model_type": name.partition(",")[0], **TINY[name], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def written(tmp_path, name="llama", *, changes=None):
    source = model_folder(tmp_path / "source", name, **(changes or {}))
    return write_hollow(source, tmp_path / "hollow")


def loaded(found, auto, **options):
    return auto.from_pretrained(found.folder, output_loading_info=True, **options)


# --- what is in the files ----------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_the_class_that_was_published_finds_each_weight_and_no_other(tmp_path, name):
    found = written(tmp_path, name)
    config = resolve_config(str(found.folder))
    model, info = loaded(found, getattr(transformers, config.architectures[0]))
    assert not any(info.values()), info
    assert (
        str(model.dtype) == f"torch.{found.dtype}" == f"torch.{TINY[name].get('dtype', 'float32')}"
    )
    assert found.parameters >= sum(p.numel() for p in model.parameters())
    assert not any(p.any() for p in model.parameters())


def test_experts_are_stored_apart_as_on_the_hub(tmp_path):
    found = written(tmp_path, "mixtral")
    with safe_open(found.folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert len([name for name in names if ".experts." in name]) == 2 * 4 * 3


def test_tied_weights_are_stored_once(tmp_path):
    found = written(tmp_path, "llama, tied")
    with safe_open(found.folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
    model, _ = loaded(found, transformers.AutoModelForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "auto", "missing", "unexpected"),
    [
        ("llama", transformers.AutoModel, set(), {"lm_head.weight"}),
        ("llama", transformers.AutoModelForSequenceClassification, {"score.weight"}, None),
        ("gemma3", transformers.AutoModelForImageTextToText, set(), set()),
        ("gpt2", transformers.AutoModel, set(), set()),
    ],
)
def test_other_classes_load_it_as_they_load_the_published_one(
    tmp_path, name, auto, missing, unexpected
):
    _, info = loaded(written(tmp_path, name), auto)
    assert set(info["missing_keys"]) == missing
    assert unexpected is None or set(info["unexpected_keys"]) == unexpected
    assert not info["mismatched_keys"]


def test_large_models_have_files_of_5_gb_and_an_index(tmp_path):
    found = write_hollow("llama-3.1-70b", tmp_path / "large")
    files = sorted(found.folder.glob("*.safetensors"))
    # The hub's repository of Llama-3.1-70B: 30 files, the first of 4,584,408,808 bytes.
    assert len(files) == 30
    assert files[0].stat().st_size == pytest.approx(4_584_408_808, rel=1e-7)
    index = json.loads((found.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * load_catalogue()["llama-3.1-70b"].params
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert found.logical_bytes > 141e9
    assert sparse.disk_bytes(files) < 2e6
    assert found.disk_bytes == sparse.disk_bytes(found.folder.iterdir())


# --- the tokenizer -----------------------------------------------------------------------


def tokenizer_of(found):
    return transformers.AutoTokenizer.from_pretrained(found.folder, local_files_only=True)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert", "roberta", "gemma3"])
def test_a_made_tokenizer_stays_in_the_vocabulary_and_knows_the_ids_of_the_config(tmp_path, name):
    found = written(tmp_path, name)
    config = resolve_config(str(found.folder)).get_text_config()
    tokenizer = tokenizer_of(found)
    text = "Grüße, world!\n\tdef f(x): return x ** 2  # 日本語 🙂"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < config.vocab_size == len(tokenizer)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for kind in ("bos", "eos", "pad"):
        wanted = getattr(config, f"{kind}_token_id", None)
        if kind == "bos" and name.startswith("qwen"):  # its tokenizer begins no text with it
            assert tokenizer.bos_token is None
        elif wanted is not None and wanted < config.vocab_size:
            assert getattr(tokenizer, f"{kind}_token_id") == wanted
    assert "made: byte-level" in found.tokenizer


def test_a_made_tokenizer_without_padding_has_a_special_token_to_spare(tmp_path):
    tokenizer = tokenizer_of(written(tmp_path))
    spare = tokenizer.convert_tokens_to_ids("<|reserved_special_token_0|>")
    assert tokenizer.pad_token is None
    assert tokenizer("<|reserved_special_token_0|>", add_special_tokens=False)["input_ids"] == [
        spare
    ]
    tokenizer.pad_token = "<|reserved_special_token_0|>"
    assert tokenizer.pad_token_id == spare == len(tokenizer) - 1


_UNPADDED = {"falcon", "gpt2", "gpt_bigcode", "llama", "mistral", "mixtral", "phi"}
"""Families whose published tokenizer_config.json names no token for padding. Of the others it is
the pad_token_id of the published config.json, or what the class of transformers pads with."""

_NOT_LOOKED_AT = {
    "bloom", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4v",
    "glm_moe_dsa", "gpt_neo", "gptj", "hy_v3", "iquestcoder", "laguna", "llama4", "llava", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax_m2", "muse_glimmer", "phimoe", "solar_open", "stablelm",
    "starcoder2", "youtu",
}  # fmt: skip
"""Families whose published tokenizers were not looked at, and that get no token for padding."""


def test_every_family_of_the_catalogue_ends_and_pads_as_its_published_tokenizer():
    found = {}
    for name, entry in load_catalogue().items():
        config = resolve_config(name)
        special = special_tokens(config, config.get_text_config().vocab_size)
        is_encoder = entry.config["model_type"] in ("bert", "distilbert", "roberta")
        assert ("sep_token" if is_encoder else "eos_token") in special, name
        ids = {id_: text for text, id_ in special.values()}
        assert len(set(ids.values())) == len(ids), name
        found.setdefault(entry.config["model_type"], set()).add("pad_token" in special)
    unpadded = {family for family, pads in found.items() if pads != {True}}
    assert unpadded - _NOT_LOOKED_AT == _UNPADDED
    assert all(pads == {False} for family, pads in found.items() if family in _UNPADDED)


@pytest.mark.parametrize(("model", "eos"), [("qwen2.5-0.5b", 151643), ("qwen3-0.6b", 151645)])
def test_qwen_pads_with_the_token_of_its_published_tokenizer(model, eos):
    """<|endoftext|>, with which no text begins; the end of a turn is a token of its own."""
    tokenizer = make_tokenizer(resolve_config(model))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 151643)
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == (None, eos)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    batch = tokenizer(["a", "longer"], padding=True)["input_ids"]
    assert batch[0] == [*tokenizer("a")["input_ids"], *[151643] * 5]


def test_a_vocabulary_with_no_room_for_every_byte_says_unknown(tmp_path):
    tokenizer = tokenizer_of(written(tmp_path, changes={"vocab_size": 80}))
    ids = tokenizer("Any text, even ß")["input_ids"]
    assert max(ids) < 80
    assert tokenizer.unk_token_id in ids


def test_a_conversation_marks_what_the_assistant_says(tmp_path):
    tokenizer = tokenizer_of(written(tmp_path))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    out = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    said = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(said) == "Ho</s>"
    assert out["input_ids"][0] == tokenizer.bos_token_id


def tokenizer_beside(folder: str, found) -> None:
    for path in found.folder.glob("*.j*"):
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)


def test_a_tokenizer_beside_the_configuration_is_copied(tmp_path):
    source = written(tmp_path)
    tokenizer_beside(str(tmp_path / "source"), source)
    other = write_hollow(str(tmp_path / "source"), tmp_path / "other")
    assert other.tokenizer == f"copied from {tmp_path / 'source'}"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (other.folder / name).read_bytes() == (source.folder / name).read_bytes()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    small = model_folder(tmp_path / "small", "llama", vocab_size=300)
    tokenizer_beside(small, written(tmp_path))
    with pytest.raises(InputError, match="has 600 tokens, and the model 300"):
        write_hollow(small, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_tokenizer_that_means_ill_is_refused(tmp_path):
    source = tmp_path / "source"
    tokenizer_beside(str(source), written(tmp_path))
    (source / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="cannot be read"):
        write_hollow(str(source), tmp_path / "refused")
    (source / "tokenizer.json").unlink()
    os.mkfifo(source / "tokenizer.json")
    with pytest.raises(InputError, match="is not a file"):
        write_hollow(str(source), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_the_hub_cache_is_asked_for_the_tokenizer(tmp_path, monkeypatch):
    from huggingface_hub import constants

    made = written(tmp_path)
    snapshot = tmp_path / "cache/models--sshleifer--tiny-gpt2/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    for path in made.folder.glob("tokenizer*"):
        (snapshot / path.name).symlink_to(path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    found = write_hollow("tiny-gpt2", tmp_path / "gpt2")
    assert found.tokenizer == f"copied from {snapshot}"
    assert not (found.folder / "tokenizer.json").is_symlink()


def test_qwen_has_the_numbers_of_its_patches(tmp_path):
    found = written(tmp_path, "qwen3_vl")
    assert found.processor == "made"
    fields = json.loads((found.folder / "preprocessor_config.json").read_text())
    vision = resolve_config(str(found.folder)).vision_config
    assert fields["patch_size"] == vision.patch_size
    assert fields["merge_size"] == vision.spatial_merge_size
    assert tokenizer_of(found).convert_tokens_to_ids("<|image_pad|>") == 590


def test_a_processor_that_is_not_known_is_said_to_be_missing(tmp_path):
    text = {**TEXT, "model_type": "llama"}
    vision = {**VISION, "image_size": 28, "model_type": "siglip_vision_model"}
    folder = tmp_path / "llava"
    folder.mkdir()
    fields = {"model_type": "llava", "text_config": text, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(fields))
    found = write_hollow(str(folder), tmp_path / "hollow")
    assert found.processor.startswith("none: it is not known for llava")


def test_gemma_3_has_a_processor_for_images(tmp_path):
    from PIL import Image

    found = written(tmp_path, "gemma3")
    assert found.processor == "made"
    processor = transformers.AutoProcessor.from_pretrained(found.folder, local_files_only=True)
    content = [
        {"type": "image", "image": Image.new("RGB", (40, 30))},
        {"type": "text", "text": "?"},
    ]
    batch = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert batch["pixel_values"].shape == (1, 3, 28, 28)
    assert int((batch["input_ids"] == 592).sum()) == 4


# --- folders -----------------------------------------------------------------------------


def test_a_hollow_checkpoint_says_that_it_is_one(tmp_path):
    found = written(tmp_path)
    assert is_hollow(found.folder)
    assert is_hollow(found.folder / "model.safetensors")
    assert not is_hollow(tmp_path / "source")
    assert "Not weights" in (found.folder / "HOLLOW.md").read_text()
    model, _ = loaded(found, transformers.AutoModelForCausalLM)
    model.save_pretrained(tmp_path / "real")
    assert not is_hollow(tmp_path / "real")


def test_a_folder_in_use_is_left_alone(tmp_path):
    folder = tmp_path / "hollow"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights of somebody")
    with pytest.raises(InputError, match="not empty and not a hollow checkpoint"):
        written(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hollow", "source"]


def test_a_hollow_folder_is_replaced(tmp_path):
    written(tmp_path)
    assert written(tmp_path, "qwen3").parameters
    assert resolve_config(str(tmp_path / "hollow")).model_type == "qwen3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hollow", "source"]


def test_nothing_is_left_of_what_could_not_be_written(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hollow, "write_shards", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_system_without_holes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse, "disk_bytes", lambda paths: sum(p.stat().st_size for p in paths))
    with pytest.raises(UnavailableError, match="no sparse files"):
        written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_quantised_checkpoint_is_refused(tmp_path):
    changes = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(InputError, match=r"quantised \(mxfp4\)"):
        written(tmp_path, changes=changes)


def test_a_transformers_that_does_not_load_what_it_saves_is_told(tmp_path, monkeypatch):
    real = hollow._write_config
    monkeypatch.setattr(hollow, "_write_config", lambda *arguments: real(*arguments)[1:])
    with pytest.raises(UnavailableError, match="missing_keys: "):
        written(tmp_path)
    assert not (tmp_path / "hollow").exists()


# --- the format --------------------------------------------------------------------------


def test_tensors_of_several_types_are_aligned_and_read_as_zeros(tmp_path):
    entries = [
        sparse.TensorEntry("odd", "U8", (3,)),
        sparse.TensorEntry("half", "BF16", (5,)),
        sparse.TensorEntry("wide", "F32", (2, 2)),
        sparse.TensorEntry("scalar", "I64", ()),
    ]
    (path,) = sparse.write_shards(tmp_path, entries)
    fields, start = sparse.read_header(path)
    assert start % 8 == 0
    for entry in entries:
        at = fields[entry.name]["data_offsets"][0]
        assert at % (sparse.ELEMENT_BITS[entry.dtype] // 8) == 0
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "tuner": "hollow"}
        assert torch.equal(file.get_tensor("wide"), torch.zeros(2, 2))
        assert file.get_tensor("scalar").shape == ()


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_what_is_no_safetensors_file_is_not_hollow(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert not is_hollow(path)
    assert not is_hollow(tmp_path)
    assert not is_hollow(tmp_path / "nowhere")


# --- the command -------------------------------------------------------------------------


def test_the_command_writes_one_and_says_what(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models", "hollow", "tiny-gpt2", str(tmp_path / "gpt2")]) == 0
    text = capsys.readouterr().out
    assert "102,714, float32, all zero" in text
    assert "made: byte-level" in text
    assert is_hollow(tmp_path / "gpt2")
    assert run(["models", "hollow", "tiny-gpt2", str(tmp_path / "gpt2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(tmp_path / "gpt2")
    assert found["parameters"] == 102_714
