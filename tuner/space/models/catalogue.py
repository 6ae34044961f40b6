"""The models that are known offline: one JSON file each in `configs/`, an architecture, no weights.

The `config` of an entry has the form of the hub's config.json, so that transformers reads it as
it would read the published one. `params` counts every weight once, a tied head included, as the
class of `auto_class` has them. Listing and finding models imports neither torch nor transformers.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tuner.core.errors import InputError, UnavailableError, nearest, unknown
from tuner.core.files import read_file
from tuner.space.models.config_fields import problem_in, shape_of, table_positions

if TYPE_CHECKING:  # transformers takes seconds to import, and only a resolved config needs it
    from transformers import PreTrainedConfig

CONFIGS = Path(__file__).parent / "configs"
LIST_COMMAND = "tuner models"

MAX_CONFIG_BYTES = 16 << 20

# How long to wait for the hub's first answer. huggingface_hub itself retries for about 25 s.
HUB_TIMEOUT_S = 5.0

# As many begun names as an error still lists one by one (see `errors.unknown`).
FEW = 12

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATH_STARTS = (".", "/", "~")

_TRANSFORMERS = "transformers"
"""`from transformers import` fails while another thread imports it; `import_module` waits."""

# Organisations that upload others' models again, under the same names.
_MIRRORS = frozenset({"unsloth", "nousresearch"})
# What repositories append to the name of a model whose weights they have in another format.
_QUANTISED = re.compile(
    r"((-unsloth)?-bnb-4bit|-(awq|gptq|fp8|nvfp4|mxfp4|bf16)(-int[48])?)$", re.IGNORECASE
)

NF4, MXFP4, FP8 = "nf4", "mxfp4", "fp8"
"""Formats of stored weights in which a training can be predicted, some on some GPUs only."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One architecture of the catalogue.

    `hub_id` is None where the hub has the architecture only as a part of another model.
    `aliases` are further hub ids and names of the same architecture. `task` is "causal-lm",
    "image-text" (a language model with its vision tower) or "encoder". `config` has the form of
    the hub's config.json. `source` says where sizes and parameter count come from; `published` is
    the count that a model card, a paper or the hub states where it is a rounded one. `format` is
    that of the weights under its hub ids where they are quantised ("fp8", "mxfp4").
    """

    id: str
    hub_id: str | None
    aliases: tuple[str, ...]
    task: str
    config: Mapping[str, Any]
    params: int | None
    source: str
    notes: str = ""
    published: float | None = None
    format: str | None = None

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of `config` that describes the language model (all of it in most models)."""
        text: Mapping[str, Any] = self.config.get("text_config", self.config)
        return text

    @property
    def hidden_size(self) -> int | None:
        """Width of the residual stream; None if it is a default of transformers."""
        return _first(self.text_config, "hidden_size", "n_embd", "d_model", "dim")

    @property
    def layers(self) -> int | None:
        """Transformer blocks of the language model; None if it is a default of transformers."""
        return _first(self.text_config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None if it is a default of transformers."""
        return _first(self.text_config, "vocab_size")

    @property
    def names(self) -> tuple[str, ...]:
        """Everything a person may type for this model: id, hub id, aliases, hub ids' last parts."""
        full = [self.id, *([self.hub_id] if self.hub_id else []), *self.aliases]
        return tuple(dict.fromkeys([*full, *(name.rpartition("/")[2] for name in full)]))


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    return next((int(config[key]) for key in keys if key in config), None)


@cache
def load_catalogue() -> Mapping[str, ModelEntry]:
    """Every known model by id, families together and small ones first. A few milliseconds."""
    raw = (json.loads(path.read_text(encoding="utf-8")) for path in CONFIGS.glob("*.json"))
    entries = [ModelEntry(**{**fields, "aliases": tuple(fields["aliases"])}) for fields in raw]
    entries.sort(key=lambda entry: (_family(entry.id), entry.params or 0, entry.id))
    return MappingProxyType({entry.id: entry for entry in entries})


def _family(model_id: str) -> str:
    """Cut the size and what follows off an id ("qwen2.5-14b" -> "qwen2.5")."""
    return re.sub(r"-\d[\dx.]*[bm].*$", "", model_id)


def family_of(name: str) -> list[ModelEntry]:
    """The models of the same family, task and type as `name`, from small to large.

    Empty for a model that is not in the catalogue.
    """

    def kind(entry: ModelEntry) -> tuple[object, ...]:
        return _family(entry.id), entry.task, entry.config["model_type"]

    own = get_entry(name)
    found = load_catalogue().values()
    return [entry for entry in found if own is not None and kind(entry) == kind(own)]


def _canonical(name: str) -> str:
    """`name` without case and without separators, except those between two digits.

    "Llama_3.1-8B" and "llama3.1-8b" become the same; "gemma-2-2b" and "gemma-22b" do not.
    """
    separated = re.sub(r"[^a-z0-9]+", "-", name.strip().lower())
    return re.sub(r"(?<!\d)-|-(?!\d)", "", separated)


@cache
def _spellings() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Ids by exact (case-folded) name, and ids by canonical name."""
    exact: dict[str, set[str]] = {}
    loose: dict[str, set[str]] = {}
    for entry in load_catalogue().values():
        for name in entry.names:
            exact.setdefault(name.lower(), set()).add(entry.id)
            loose.setdefault(_canonical(name), set()).add(entry.id)
    return exact, loose


def get_entry(name: str) -> ModelEntry | None:
    """Return the entry that `name` means (id, hub id or alias), or None.

    Case does not count, nor does the choice of separators where only one model is meant. A copy
    that a mirror uploaded is the model that it copies, and one with its weights in another format
    ("Qwen/Qwen3-8B-AWQ") has its architecture. What is written as a path ("./roberta-base") is a
    folder, never a catalogue name. Uses neither the network nor transformers.
    """
    if name.startswith(_PATH_STARTS):
        return None
    plain = _QUANTISED.sub("", name.strip())
    organisation, _, rest = plain.partition("/")
    if rest and (plain != name.strip() or organisation.lower() in _MIRRORS):
        plain = rest
    for table, key in zip(_spellings(), (plain.lower(), _canonical(plain)), strict=True):
        ids = table.get(key, set())
        if len(ids) == 1:
            return load_catalogue()[next(iter(ids))]
    return None


def entry_like(name: str) -> ModelEntry | None:
    """The entry that a name means, or that a local folder has the shape, length and dtype of."""
    if (entry := get_entry(name)) is not None:
        return entry
    path = _existing_path(name)
    if path is None or not (path / "config.json").is_file():
        return None
    try:
        fields = json.loads(read_file(path / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):  # `resolve_config` says what is wrong
        return None
    return _by_shape().get(_looks(fields)) if isinstance(fields, dict) else None


@cache
def _by_shape() -> dict[str | None, ModelEntry]:
    found = {_looks(entry.config): entry for entry in load_catalogue().values()}
    found.pop(None, None)
    return found


def _looks(config: Mapping[str, Any]) -> str | None:
    """Text that is equal for equal shapes, lengths and dtypes; None for an unknown shape."""
    shape, length = shape_of(config), config.get("max_position_embeddings")
    dtype = config.get("dtype") or config.get("torch_dtype")
    return None if shape is None else json.dumps([shape, length, dtype], sort_keys=True)


def stored_format(name: str) -> str | None:
    """The format of the weights of a catalogue checkpoint, by its name; None if it is of 16 bits.

    None as well for the id of an entry, which is the architecture, and for unknown names, whose
    config.json says it.
    """
    entry = get_entry(name)
    if entry is None:
        return None
    found = _QUANTISED.search(name.strip())
    if found is None:
        return entry.format if "/" in name else None
    kind = (found[3] or NF4).lower()
    return None if kind == "bf16" else kind


def resolve_config(name: str) -> PreTrainedConfig:
    """Return the transformers config of a model: catalogue, else local folder, else the hub.

    A hub config in the local cache is taken without asking the network. Code that comes with a
    model is never run. Raises `InputError` for an unknown name, a folder without a usable
    config.json, and a hub id that cannot be read (no network, gated, no such repository).
    """
    entry = get_entry(name)
    if entry is not None:
        fields = copy.deepcopy(dict(entry.config))
        known = importlib.import_module(_TRANSFORMERS).CONFIG_MAPPING
        if fields["model_type"] not in known:
            raise UnavailableError(
                f"transformers {version('transformers')} has no models of type "
                f"{fields['model_type']!r}, as {entry.id} is",
                hint="install a newer transformers",
            )
        return known[fields["model_type"]].from_dict(fields)
    path = _existing_path(name)
    if path is not None:
        return _from_folder(path)
    if name.startswith(_PATH_STARTS):
        raise InputError(f"model folder {name!r} does not exist")
    if not HUB_ID.fullmatch(name):
        raise unknown_model(name)
    return _from_hub(name)


def _existing_path(name: str) -> Path | None:
    if not name.strip():
        return None  # Path("") would be the current folder
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown ~user, a null byte
        return None


def unknown_model(name: str) -> InputError:
    """The error for a name that is no model: what it may have been meant to be."""
    key = _canonical(name)
    begun = [known for known in load_catalogue() if _canonical(known).startswith(key)]
    # "mistral-7b" begins two names, and neither may be chosen for the user.
    if key and 0 < len(begun) <= FEW:
        return unknown("model", name, begun, list_command=LIST_COMMAND)
    return unknown(
        "model", name, load_catalogue(), list_command=LIST_COMMAND, spellings=_all_names()
    )


def _all_names() -> list[str]:
    return [name for entry in load_catalogue().values() for name in entry.names]


def _from_folder(path: Path) -> PreTrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"model folder {str(path)!r} has no config.json",
            hint="give the folder of a model as transformers saves it",
        )
    try:
        fields = json.loads(read_file(file, MAX_CONFIG_BYTES))
    except RecursionError:
        raise InputError(f"{str(file)!r} cannot be read as JSON: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputError(
            f"{str(file)!r} is not a model config: it names no model_type",
            hint="a config.json of transformers has at least model_type and architectures",
        )
    try:
        return _auto_config(str(file), named=str(path))
    except _NotThereError as error:
        raise InputError(f"{str(file)!r} cannot be read: {error.__cause__}") from error


def _from_hub(name: str) -> PreTrainedConfig:
    try:
        return _auto_config(name, named=name, local_files_only=True)
    except _NotThereError:  # not in the cache: ask the hub
        _require_hub(name)
    try:
        return _auto_config(name, named=name)
    except _NotThereError as error:
        raise _hub_error(name, error) from error


class _NotThereError(Exception):
    """transformers found no config.json; its cause is the OSError that says why."""


def _auto_config(source: str, *, named: str, **options: Any) -> PreTrainedConfig:
    """`AutoConfig` without remote code; whatever is wrong with the config is an `InputError`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.configuration_utils import PreTrainedConfig

    try:
        fields, _ = PreTrainedConfig.get_config_dict(source, **options)
        if problem := problem_in(fields):
            raise ValueError(problem)
        config = importlib.import_module(_TRANSFORMERS).AutoConfig.from_pretrained(
            source, trust_remote_code=False, **options
        )
        if problem := problem_in(config.to_dict()):  # what it does not say has defaults
            raise ValueError(problem)
        names = config.architectures  # they are names, which all else takes
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise ValueError(f"architectures is {str(names)[:60]}, and must be a list of names")
        return config
    except OSError as error:
        raise _NotThereError from error
    except ImportError as error:
        problem = " ".join(str(error).split())[:300]
        raise UnavailableError(f"model {named!r} needs a library: {problem}") from error
    except (
        ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
        StrictDataclassError,
    ) as error:  # fmt: skip
        if "trust_remote_code" in str(error):
            problem = "it needs its own code, which is never run"
        else:
            problem = " ".join(str(error).split())[:300]
        raise InputError(
            f"the config of model {named!r} cannot be used: {problem}",
            hint=f"`{LIST_COMMAND}` lists the models that work offline",
        ) from error


def _require_hub(name: str) -> None:
    """Raise `InputError` unless the hub answers; one request, no retries."""
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        raise _no_hub(name, "HF_HUB_OFFLINE is set")
    try:
        urlopen(  # noqa: S310 - the endpoint is the user's own setting
            Request(constants.ENDPOINT, method="HEAD"),  # noqa: S310
            timeout=HUB_TIMEOUT_S,
        ).close()
    except HTTPError:
        return  # an answer, if an unfriendly one: the hub is there
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLError):
            return  # huggingface_hub brings certificates of its own and may still get through
        raise _no_hub(name, f"{constants.ENDPOINT} does not answer ({reason})") from error


def _no_hub(name: str, reason: str) -> InputError:
    close = nearest(name, _all_names())
    meant = f"did you mean {close!r}? " if close else ""
    return InputError(
        f"model {name!r} is not in the catalogue and needs the network: {reason}",
        hint=f"{meant}use a model that `{LIST_COMMAND}` lists, or a folder with its config.json",
    )


def _hub_error(name: str, error: _NotThereError) -> InputError:
    """Say to the user what the hub's answer means."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(e, GatedRepoError) for e in chain):
        return InputError(
            f"model {name!r} is gated on the hub",
            hint="accept its licence there and run `hf auth login`, or use a folder with its "
            "config.json",
        )
    if any(isinstance(e, RepositoryNotFoundError) for e in chain):
        return unknown_model(name)
    if any(isinstance(e, EntryNotFoundError) for e in chain) and "config.json" in str(chain[1]):
        return InputError(f"model {name!r} has no config.json on the hub")
    return _no_hub(name, " ".join(str(chain[1]).split())[:300])


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers Auto class whose `from_config` builds the model of a config.

    By the published architecture: a causal language model with its head, a vision-language
    model whole, an encoder without a task head.
    """
    import transformers

    name = (config.architectures or [""])[0]
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    if getattr(config, "vision_config", None) is not None:
        return transformers.AutoModelForImageTextToText
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    if not name and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model that a compiled prediction depends on.

    `digest` changes with what a step depends on (`shape_of`); `sliding_window` is in tokens, None
    for models without one; `positions` how many tokens a model has whose positions are looked up in
    a table of that length, None for the others. `layers` are those of its text. `stored` is the
    `stored_format` of the checkpoint, and `base` the entry that it was made from. `linears` are the
    names of all its linear layers but the head where they are known: "all-linear" to peft.
    """

    digest: str
    sliding_window: int | None
    positions: int | None = None
    layers: int | None = None
    stored: str | None = None
    base: str | None = None
    linears: frozenset[str] = frozenset()


_SEVEN = frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
_OF_SEVEN = frozenset([
    "cohere", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "olmo3",
    "qwen2", "qwen3", "smollm3",
])  # fmt: skip
"""Types of models whose linear layers have the names of Llama's."""


def architecture(name: str) -> Architecture:
    """The architecture of a model. Models of the catalogue need no transformers for it.

    Raises `InputError` as `resolve_config` does.
    """
    entry = entry_like(name)
    if entry is None:
        return architecture_of(resolve_config(name))
    text = json.dumps(shape_of(entry.config) or entry.config, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    kinds = entry.text_config.get("layer_types", ["sliding_attention"])
    slides = entry.text_config.get("use_sliding_window", True) and "sliding_attention" in kinds
    window = entry.text_config.get("sliding_window") if slides else None
    layers = entry.text_config.get("num_hidden_layers")
    positions = table_positions(entry.config)
    return Architecture(
        digest,
        window,
        positions,
        layers,
        stored_format(name),
        entry.id,
        _SEVEN if entry.config["model_type"] in _OF_SEVEN else frozenset(),
    )


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """The architecture that a configuration describes."""
    text_config = config.get_text_config()
    return Architecture(
        config_digest(config),
        getattr(text_config, "sliding_window", None),
        table_positions(config.to_dict()),
        getattr(text_config, "num_hidden_layers", None),
        linears=_SEVEN if config.model_type in _OF_SEVEN else frozenset(),
    )


def config_digest(config: PreTrainedConfig) -> str:
    """Return 16 hex digits that stay the same as long as the architecture does, for cache keys.

    Where the config came from and which transformers wrote it do not count; every other field
    does, because a field too many costs a cache miss and one too few a wrong number.
    """
    fields = config.to_dict()
    for key in ("transformers_version", "_name_or_path"):
        fields.pop(key, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
