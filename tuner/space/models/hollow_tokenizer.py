"""The tokenizer and the image processor of a hollow checkpoint, without a download.

A tokenizer is the model's own where it is at hand, else one that is made.

A made one splits text into bytes, each a token. Its ids are in the range of the model, and the
special tokens have the ids that the configuration names; numbers of tokens are several times
those of the real tokenizer.

A processor says how images become tokens, as the hub's processor files do, for the families whose
numbers are in the configuration.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tuner.core.errors import InputError
from tuner.core.files import read_file
from tuner.space.models.catalogue import get_entry
from tuner.space.models.config_fields import table_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class _ImageTokens:
    """The special tokens of a family of image-text models.

    `fields` has, by the name that the processor asks the tokenizer for, the field of the
    configuration with the id, and the token; `placeholder` is what stands for an image in a
    conversation.
    """

    fields: Mapping[str, tuple[str, str]]
    placeholder: str

    def at(self, config: PreTrainedConfig) -> dict[str, tuple[str, int]]:
        """Token and id by the name that the processor asks for."""
        found = {
            name: (token, getattr(config, f, None)) for name, (f, token) in self.fields.items()
        }
        return {name: (token, id_) for name, (token, id_) in found.items() if id_ is not None}


_QWEN = _ImageTokens(
    {
        "image_token": ("image_token_id", "<|image_pad|>"),
        "video_token": ("video_token_id", "<|video_pad|>"),
        "vision_bos_token": ("vision_start_token_id", "<|vision_start|>"),
        "vision_eos_token": ("vision_end_token_id", "<|vision_end|>"),
    },
    "<|vision_start|><|image_pad|><|vision_end|>",
)
_GEMMA = _ImageTokens(
    {
        "boi_token": ("boi_token_index", "<start_of_image>"),
        "eoi_token": ("eoi_token_index", "<end_of_image>"),
        "image_token": ("image_token_index", "<image_soft_token>"),
    },
    "<start_of_image>",
)
IMAGE_TOKENS = {
    "gemma3": _GEMMA,
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
}
"""By model type."""


def add_processor(folder: Path, config: PreTrainedConfig) -> str | None:
    """Write the processor's files, and say what was written; None for models without images."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    if config.model_type not in IMAGE_TOKENS:
        return f"none: it is not known for {config.model_type}; copy the files of its own"
    if config.model_type == "gemma3":
        image, processor = _gemma_files(config)
    else:
        image, processor = _qwen_files(config)
    for name, fields in (("preprocessor_config.json", image), ("processor_config.json", processor)):
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return "made"


def _gemma_files(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    side = config.vision_config.image_size
    shared = {"image_seq_length": config.mm_tokens_per_image, "processor_class": "Gemma3Processor"}
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"height": side, "width": side},
        **shared,
    }
    return image, shared


def _qwen_files(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = config.vision_config
    third = config.model_type.startswith("qwen3")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(config.model_type, "Qwen3VL")
    # The smallest and the largest image, in pixels, as the hub's files of each family have them.
    fewest, most = (65_536, 16_777_216) if third else (3_136, 12_845_056)
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast" if third else "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5] if third else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if third else [0.26862954, 0.26130258, 0.27577711],
        "size": {"shortest_edge": fewest, "longest_edge": most},
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "processor_class": f"{name}Processor",
    }
    return image, {"processor_class": f"{name}Processor"}


MAX_FILE_BYTES = 256 << 20
"""Limit for one file of a tokenizer; the largest published one has 33 MB."""

MADE = "made: byte-level; token counts are not the real tokenizer's"

_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template*", "*processor_config.json",
)  # fmt: skip

# Most decoders that name no padding have special tokens without a use; some trainers pad with one,
# and stop where there is none. The name is Llama 3's.
_RESERVED = "<|reserved_special_token_0|>"

_PUBLISHED = {
    "Qwen2Tokenizer": {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
}
"""Ids that configurations leave out, by the class of the tokenizer: added_tokens_decoder of
tokenizer_config.json of Qwen/Qwen2.5-7B and Qwen/Qwen3-8B."""

_WORDPIECE = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}

# Conversations, with the marks of what an assistant says, which some losses need. An image stands
# where its placeholder is.
_CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}
{%- elif part['type'] == 'image' -%}IMAGE
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token or '' -}}
{%- for message in messages -%}
{{- '[' + message['role'] + ']\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- parts(message['content']) + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- parts(message['content']) -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class _Spoken:
    """In words: where tokenizer and processor are from (a processor: of image-text models)."""

    tokenizer: str
    processor: str | None


def add_tokenizer(folder: Path, config: PreTrainedConfig, *, model: str) -> _Spoken:
    """Put a tokenizer into `folder`: the model's own, else one is made.

    The model's own is beside its configuration or in the local Hugging Face cache. Raises
    `InputError` where it cannot be read or has more tokens than the model.
    """
    found = _own(model)
    if found is None:
        _save_made(folder, config)
        return _Spoken(MADE, add_processor(folder, config))
    _copy(found, folder)
    _require_fits(folder, config, found)
    processor = None
    if getattr(config, "vision_config", None) is not None:
        has_one = any(folder.glob("*processor_config.json"))
        processor = "copied" if has_one else "none: there is none beside the tokenizer"
    return _Spoken(f"copied from {found}", processor)


def _own(model: str) -> Path | None:
    """The folder with the tokenizer of a model, or None where it is not at hand."""
    entry = get_entry(model)
    if entry is None and Path(model).is_dir():
        return Path(model) if any(Path(model).glob("tokenizer*.json")) else None
    names = entry.names if entry is not None else (model,)
    return next((path for name in names if (path := _cached(name))), None)


def _cached(name: str) -> Path | None:
    """The folder in the local cache with the tokenizer of a hub id, or None."""
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path).parent
    return None


def _copy(source: Path, folder: Path) -> None:
    for file in sorted({path for pattern in _FILES for path in source.glob(pattern)}):
        if not file.is_dir():
            (folder / file.name).write_bytes(read_file(file, MAX_FILE_BYTES))


def _require_fits(folder: Path, config: PreTrainedConfig, source: Path) -> None:
    """Compare the tokens in tokenizer.json, which is read as data, with the rows of the model."""
    file = folder / "tokenizer.json"
    if not file.exists() and (any(folder.glob("vocab.*")) or any(folder.glob("*.model"))):
        return  # an older form, which only its own library reads
    try:
        read = json.loads(file.read_bytes())
        # A mapping of tokens to their numbers, or a list of tokens with their scores.
        known = {one if isinstance(one, str) else one[0] for one in read["model"]["vocab"]}
        tokens = len(known | {one["content"] for one in read["added_tokens"]})
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise InputError(f"the tokenizer in {str(source)!r} cannot be read: {error}") from error
    rows = _rows(config)
    if tokens > rows:
        raise InputError(
            f"the tokenizer in {str(source)!r} has {tokens:,} tokens, and the model {rows:,}",
            hint="put the tokenizer of this model beside its configuration, or none",
        )


def _save_made(folder: Path, config: PreTrainedConfig) -> None:
    """Make a tokenizer that has as many tokens as the model, however it is loaded.

    Some classes of tokenizers, which transformers takes by the type of the model, add special
    tokens of their own: those get a place inside the vocabulary.
    """
    own: tuple[str, ...] = ()
    for _ in range(2):
        make_tokenizer(config, own).save_pretrained(folder)
        # Programs with transformers 4 load the folder: they know this name of the class too.
        file = folder / "tokenizer_config.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(fields, indent=2), encoding="utf-8")
        found = _load(folder)
        rows = _rows(config)
        own = tuple(text for text, id_ in found.get_added_vocab().items() if id_ >= rows)
        if not own:
            return
    _require_fits(folder, config, folder)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _rows(config: PreTrainedConfig) -> int:
    """The number of tokens the model knows."""
    return int(config.get_text_config().vocab_size)


def make_tokenizer(config: PreTrainedConfig, own: Sequence[str] = ()) -> Any:
    """A byte-level tokenizer for the model of `config`, as a tokenizer of transformers.

    `own` are further special tokens, whose ids do not matter.
    """
    from transformers import PreTrainedTokenizerFast

    rows = _rows(config)
    images = IMAGE_TOKENS.get(config.model_type)
    special = special_tokens(config, rows)
    more = {} if images is None else images.at(config)
    at = {id_: name for id_, name in _published(config).items() if id_ < rows}
    at |= {id_: name for name, id_ in (*special.values(), *more.values()) if id_ < rows}
    at |= dict(zip((id_ for id_ in range(rows) if id_ not in at), own, strict=False))
    if "pad_token" not in special and "unk_token" not in special and rows - 1 not in at:
        at[rows - 1] = _RESERVED
    vocabulary = _vocabulary(rows, at)
    unknown_token = special["unk_token"][0] if "unk_token" in special else None
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown_token))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(at[id_], special=True) for id_ in sorted(at)])
    _add_frame(tokenizer, special)
    text = table_positions(config.to_dict()) or getattr(
        config.get_text_config(), "max_position_embeddings", None
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=text or int(1e30),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        extra_special_tokens={name: token for name, (token, _) in more.items()},
        **{name: token for name, (token, _) in special.items()},
    )
    made.chat_template = _CHAT_TEMPLATE.replace("IMAGE", images.placeholder if images else "")
    return made


def special_tokens(config: PreTrainedConfig, rows: int) -> dict[str, tuple[str, int]]:
    """Text and id by the name that transformers gives the token ("eos_token").

    The ids are those of the configuration. Where it has none for padding, texts are padded as the
    tokenizer's class does by default; and none begins with a token that the class leaves out.
    """
    own = _of_class(config)
    wanted = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    by_id = {id_: text for id_, text in _published(config).items() if id_ < rows}
    found: dict[str, tuple[str, int]] = {}
    for name in reversed(wanted):  # an end that is also beginning or padding keeps its name
        id_ = _first(config, f"{name}_id")
        is_left_out = name == "bos_token" and own.get(name, "") is None
        if id_ is not None and 0 <= id_ < rows and not is_left_out:
            text = own.get(name) or wanted[name]
            text = wanted[name] if text in by_id.values() else text
            found[name] = (by_id.setdefault(id_, text), id_)
    free = (id_ for id_ in range(rows) if id_ not in by_id)
    padding = own.get("pad_token")
    if padding and "pad_token" not in found:
        at = next((id_ for id_, text in by_id.items() if text == padding), None)
        found["pad_token"] = (padding, next(free) if at is None else at)
    if _is_encoder(config):
        # Where nothing else is said, what begins and ends a text are the classes' tokens.
        ends = {"cls_token": found.get("bos_token"), "sep_token": found.get("eos_token")}
        for name, text in _WORDPIECE.items():
            found[name] = ends.get(name) or (text, next(free))
        found.setdefault("pad_token", ("<pad>", next(free)))
    elif "eos_token" not in found:
        found["eos_token"] = (wanted["eos_token"], next(free))
    if rows < len(found) + 256:  # no room for every byte
        found["unk_token"] = ("<unk>", next(free))
    return found


def _class_name(config: PreTrainedConfig) -> str:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    found: Any = TOKENIZER_MAPPING_NAMES.get(config.model_type)
    found = next(filter(None, found), None) if isinstance(found, tuple) else found  # in release 4
    return str(found or "").removesuffix("Fast")


def _published(config: PreTrainedConfig) -> Mapping[int, str]:
    return _PUBLISHED.get(_class_name(config), {})


def _of_class(config: PreTrainedConfig) -> dict[str, str | None]:
    """Special tokens that a tokenizer of this type of model has by default; None for none."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = _class_name(config)
    kind = tokenizer_class_from_name(name) if name else None
    if kind is None:
        return {}
    return {
        name: None if parameter.default is None else str(parameter.default)
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name in ("pad_token", "bos_token", "eos_token")
        and parameter.default is not inspect.Parameter.empty
    }


def _is_encoder(config: PreTrainedConfig) -> bool:
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)


def _first(config: PreTrainedConfig, name: str) -> int | None:
    for part in (config, config.get_text_config()):
        value = getattr(part, name, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            return value
    return None


def _vocabulary(rows: int, at: Mapping[int, str]) -> dict[str, int]:
    """`rows` tokens: `at` their ids the special ones, then the bytes, then such as never occur."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # the characters that stand for bytes
    common = [character for character in ("\u0120", "\u010a") if character in alphabet]
    unused = (f"<unused{n}>" for n in range(rows))
    names: Iterable[str] = (*common, *sorted(alphabet - set(common)), *unused)
    others = iter(names)
    return {at[id_] if id_ in at else next(others): id_ for id_ in range(rows)}


def _add_frame(tokenizer: Any, special: Mapping[str, tuple[str, int]]) -> None:
    """Add the begin token to each text, and for encoders the end token."""
    if "cls_token" in special:
        first, last = special["cls_token"], special["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first[0]} $A {last[0]}",
            pair=f"{first[0]} $A {last[0]} $B:1 {last[0]}:1",
            special_tokens=[first, last],
        )
    elif "bos_token" in special and special["bos_token"] != special.get("eos_token"):
        first = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first[0]} $A", pair=f"{first[0]} $A $B:1", special_tokens=[first]
        )
