"""The tables of what libraries take: beside the classes themselves, and in other releases."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import pytest

from tuner.core.errors import UndecidedError
from tuner.program import releases
from tuner.program.planned import plan_program
from tuner.program.program import read_program
from tuner.program.releases import (
    FILE,
    SHIPPED,
    Meant,
    classes,
    default,
    exports,
    known,
    lacks,
    library,
    meant,
    names_of,
    takes,
)
from tuner.program.sources import Reader

HOMES = {
    "transformers": ("transformers", "transformers.utils.quantization_config"),
    "trl": ("trl", "trl.scripts.utils", "trl.trainer.base_config"),
    "peft": ("peft", "peft.config"),
    "accelerate": ("accelerate", "accelerate.utils"),
    "torch": ("torch", "torch.optim", "torch.utils.data"),
    "bitsandbytes": ("bitsandbytes.optim",),
}
"""The modules that have a library's classes under their names."""

SECRETLY = {"accelerate.Accelerator.split_batches"}
"""The only defaults that are unknown: an object of its own."""


@pytest.fixture
def unread(tmp_path, monkeypatch):
    """Nothing is shipped and nothing is kept: the classes are those of the installed sources."""
    monkeypatch.setattr(releases, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(releases, "_shipped", dict)
    for kept in (library, releases._tables):
        kept.cache_clear()
    yield
    for kept in (library, releases._tables):
        kept.cache_clear()


def plain(value: object) -> object:
    """A default as the tables have it."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def real_classes(root: str, names: set[str]) -> dict[str, type]:
    """The classes and functions of an imported library, by their names in the tables."""
    homes = [importlib.import_module(name) for name in HOMES[root]]
    if root == "trl":
        path = importlib.import_module("trl.experimental").__path__
        packages = [each.name for each in pkgutil.iter_modules(path) if each.ispkg]
        for name in packages:
            try:
                homes.append(importlib.import_module(f"trl.experimental.{name}"))
            except ImportError:
                continue  # it needs vLLM or another library
    pairs = [(f"{root}.{name}", home, name) for home in homes for name in dir(home)]
    return {full: getattr(home, name) for full, home, name in reversed(pairs) if full in names}


def check_default(said: dict, real: object, where: str) -> None:
    if real in (dataclasses.MISSING, inspect.Parameter.empty):
        assert "default" not in said, where
    elif isinstance(said["default"], dict) and "$unknown" in said["default"]:
        assert where in SECRETLY
    elif isinstance(said["default"], dict) and "$object" in said["default"]:
        assert said["default"]["$object"]["class"].endswith(f".{type(real).__name__}")
    else:
        assert said["default"] == plain(real), where


def real_defaults(kind: type | object, *, is_dataclass: bool) -> dict[str, object]:
    if not is_dataclass:
        parameters = inspect.signature(getattr(kind, "__init__", kind)).parameters.values()
        if not isinstance(kind, type):
            parameters = inspect.signature(kind).parameters.values()
        named = [p for p in parameters if p.name != "self" and p.kind not in (p.VAR_KEYWORD,)]
        return {p.name: p.default for p in named}
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(kind)
        if field.init
    }


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("root", "least"), [
    ("transformers", 350), ("trl", 2500), ("peft", 600), ("accelerate", 180), ("torch", 100),
    ("bitsandbytes", 250),
])  # fmt: skip
def test_names_and_defaults_are_those_of_the_imported_library(root, least):
    """Without an import of it: every field and every parameter, in their order."""
    tables = {name: known(name) for name in classes(HOMES)}
    compared = 0
    for name, kind in real_classes(root, set(tables)).items():
        its = tables[name]
        is_dataclass = "parameters" not in its
        if is_dataclass and not dataclasses.is_dataclass(kind):
            continue
        real = real_defaults(kind, is_dataclass=is_dataclass)
        assert list(its["fields"]) == list(real), name
        for field, value in real.items():
            check_default(its["fields"][field], value, f"{name}.{field}")
        if not is_dataclass:
            signature = inspect.signature(kind.__init__ if isinstance(kind, type) else kind)
            positional = [
                p.name
                for p in signature.parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"
            ]
            assert its["parameters"] == positional, name
            assert its["open"] == any(
                p.kind is p.VAR_KEYWORD for p in signature.parameters.values()
            )
        compared += len(real)
    assert compared >= least


def test_the_shipped_table_is_of_the_releases_that_predictions_are_of():
    """What is read here and what the file says are the same, and it is no large file."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    site = Path(importlib.util.find_spec("trl").origin).parents[1]
    for name in ("trl", "transformers", "peft"):
        if library(name).release == table[name]["release"]:
            read_here = Reader(name, site / name, (2, 13)).read()
            assert read_here == table[name]["rows"], "python -m benchmarks.releases"
    assert FILE.stat().st_size < 150_000


def test_trl_sets_bf16_where_fp16_is_not():
    assert known("trl.SFTConfig")["contrary"] == {"bf16": "fp16"}
    assert known("transformers.TrainingArguments")["contrary"] == {}
    assert known("trl.SFTConfig")["bases"][-1] == "transformers.TrainingArguments"


def install(folder: Path, release: str, config: str, files: dict[str, str] | None = None) -> None:
    """A library `trl` with this text in its sft_config.py."""
    package = folder / "trl"
    (package / "trainer").mkdir(parents=True, exist_ok=True)
    (folder / f"trl-{release}.dist-info").mkdir(exist_ok=True)
    for name, text in {"__init__.py": "raise SystemExit\n", **(files or {})}.items():
        (package / name).write_text(text)
    (package / "trainer/sft_config.py").write_text(config)


OLD = """\
from dataclasses import dataclass, field
from transformers import TrainingArguments
from ..words import Strategy, LENGTH, is_torch_greater_or_equal_than_2_8

@dataclass
class SFTConfig(TrainingArguments):
    chosen = "slow"
    if is_torch_greater_or_equal_than_2_8:
        chosen = "fast"
    if is_a_tuesday():
        other = 1
    kind: str = chosen
    max_seq_length: int | None = field(default=LENGTH)
    strategy: Strategy = field(default=Strategy.BFD)
    words: list = field(default_factory=lambda: ["a", -1])
    kwargs: dict = field(default_factory=dict)
    later: int = field(default=other)
    made: int = field(init=False, default=3)
    needed: int = field(metadata={})
"""
WORDS = """\
from enum import Enum
LENGTH = 1024
class Strategy(str, Enum):
    BFD = "bfd"
"""


@pytest.fixture
def old(tmp_path, monkeypatch) -> tuple[str]:
    """The folder of an environment with TRL 0.15, which nothing imports."""
    monkeypatch.setattr(releases, "user_cache", lambda: tmp_path / "cache")
    install(tmp_path, "0.15.1", OLD, {"words.py": WORDS})
    releases._listed.cache_clear()
    return (str(tmp_path),)


def test_defaults_are_followed_to_constants_and_enums_of_the_users_own_release(old):
    said = known("trl.SFTConfig", old)["fields"]
    mine = {name: said[name].get("default") for name in list(said)[-7:]}
    assert mine == {
        "kind": "fast", "max_seq_length": 1024, "strategy": "bfd", "words": ["a", -1],
        "kwargs": {}, "later": {"$unknown": "other"}, "needed": None,
    }  # fmt: skip
    assert "default" not in said["needed"]
    assert "made" not in said
    assert "per_device_train_batch_size" in said
    assert library("trl", old).title == "TRL 0.15.1"
    assert library("trl", old).is_before("0.19")


def test_a_library_is_read_again_only_if_its_files_differ(old, tmp_path, monkeypatch):
    reads = []
    own = Reader.source

    def source(self, path):
        reads.append(path)
        return own(self, path)

    monkeypatch.setattr(Reader, "source", source)

    def again() -> tuple[object, bool]:
        reads.clear()
        for kept in (library, releases._tables, releases._listed):
            kept.cache_clear()
        return default("trl.SFTConfig", "max_seq_length", old), bool(reads)

    assert again() == (1024, True)
    assert again() == (1024, False)
    (tmp_path / "trl/words.py").write_text(WORDS.replace("1024", "4096"))
    assert again() == (4096, True)
    [kept] = (tmp_path / "cache/releases").iterdir()
    for damaged in ("[", "{}", '{"torch": 1, "files": 3, "rows": {}}'):
        kept.write_text(damaged)
        assert again() == (4096, True)
        assert again() == (4096, False)


def test_the_module_that_a_class_is_imported_from(tmp_path):
    (tmp_path / "trl/experimental/orpo").mkdir(parents=True)
    (tmp_path / "trl/__init__.py").write_text('_import_structure = {"trainer": ["SFTTrainer"]}')
    text = "from .orpo_trainer import ORPOTrainer"
    (tmp_path / "trl/experimental/orpo/__init__.py").write_text(text)
    (tmp_path / "transformers/models/roc_bert").mkdir(parents=True)
    (tmp_path / "transformers/__init__.py").write_text('_structure = {"a": ["Trainer"]}')
    found = exports((str(tmp_path),))
    assert found["transformers"] == {"Trainer": "transformers", "rocbert*": "transformers"}
    its = {name: found["trl"].get(name) for name in ("ORPOTrainer", "SFTTrainer", "GRPOTrainer")}
    assert [*its.values()] == ["trl.experimental.orpo", "trl", None]


def test_what_is_not_installed_is_of_the_shipped_release(tmp_path):
    nothing = (str(tmp_path),)
    assert library("trl", nothing) == library("trl", SHIPPED)
    assert default("trl.SFTConfig", "max_length", nothing) == 1024
    assert library("nosuch") is None
    assert takes("nosuch.Config", "a") is None
    assert takes("trl.NoSuchConfig", "a") is None
    assert default("trl.SFTConfig", "nosuch") == {"$unknown": "trl.SFTConfig nosuch"}


LACKING = [
    ("trl.SFTConfig", "max_seq_length",
     "SFTConfig in TRL 1.16 has no max_seq_length (until 0.19): use max_length"),
    ("trl.SFTTrainer", "max_seq_length", "(until 0.12): use SFTConfig(max_length=512)"),
    ("trl.SFTTrainer", "packing", "use SFTConfig(packing=512)"),
    ("trl.SFTConfig", "peft_config", "use SFTTrainer(peft_config=512)"),
    ("trl.SFTConfig", "evaluation_strategy", "(until transformers 4.50): use eval_strategy"),
    ("trl.SFTConfig", "per_device_train_batchsize", "did you mean per_device_train_batch_size?"),
    ("trl.SFTConfig", "nothing_like_it", "has no nothing_like_it: remove it"),
    ("transformers.TrainingArguments", "adafactor", "use optim='adafactor'"),
    ("transformers.PreTrainedModel.gradient_checkpointing_enable", "reentrant",
     "gradient_checkpointing_enable in transformers 5.23 has no reentrant"),
    ("transformers.from_pretrained", "load_in_4bit",
     "use quantization_config=BitsAndBytesConfig(load_in_4bit=True)"),
    ("transformers.BitsAndBytesConfig", "bnb_4bit_use_doublequant",
     ", and ignores it: did you mean bnb_4bit_use_double_quant?"),
    ("TRL", "max_seq_length", "TRL 1.16 has no max_seq_length (until 0.19): use max_length"),
    ("Axolotl", "max_seq_length", ", and ignores it: use sequence_len"),
    ("LLaMA-Factory", "max_seq_length", "use cutoff_len"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "said"), LACKING)
def test_an_argument_that_a_release_lacks_is_told_with_the_newest_that_has_it(name, argument, said):
    note = lacks(name, argument, "512", SHIPPED)
    assert note is not None
    assert said in note


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("trl.SFTConfig", "max_length"),
        ("transformers.from_pretrained", "torch_dtype"),
        ("unsloth.FastLanguageModel.from_pretrained", "max_seq_length"),
        ("nosuch.Config", "anything"),
    ],
)
def test_nothing_is_said_of_an_argument_that_is_taken(name, argument):
    assert lacks(name, argument, folders=SHIPPED) is None


def test_the_release_of_the_program_decides(old):
    assert lacks("trl.SFTConfig", "max_seq_length", folders=old) is None
    said = "SFTConfig in TRL 0.15.1 has no max_length (since 0.16): use max_seq_length"
    assert lacks("trl.SFTConfig", "max_length", folders=old) == said
    said = "SFTConfig in TRL 0.15.1 has no loss_type (since 0.23): remove it, or update TRL"
    assert lacks("trl.SFTConfig", "loss_type", folders=old) == said


@pytest.mark.parametrize(
    ("name", "argument", "value", "counts"),
    [
        ("trl.SFTConfig", "max_seq_length", 8, Meant("trl.SFTConfig", "max_length", 8)),
        ("trl.SFTTrainer", "max_seq_length", 8, Meant("trl.SFTConfig", "max_length", 8)),
        ("trl.SFTConfig", "nosuch", 8, None),
        (
            "transformers.TrainingArguments",
            "adafactor",
            True,
            Meant("transformers.TrainingArguments", "optim", "adafactor"),
        ),
        ("transformers.TrainingArguments", "adafactor", False, None),
        ("transformers.BitsAndBytesConfig", "load_in_four_bit", True, None),
        (
            "transformers.from_pretrained",
            "load_in_4bit",
            True,
            Meant("transformers.from_pretrained", "load_in_4bit", True),
        ),
        ("LLaMA-Factory", "max_seq_length", 8, Meant("LLaMA-Factory", "cutoff_len", 8)),
        ("Axolotl", "max_seq_length", 8, None),
    ],
)
def test_an_older_name_counts_as_what_it_is_called_now(name, argument, value, counts):
    assert meant(name, argument, value) == counts


def test_a_method_is_that_of_the_base(old):
    vision = names_of("unsloth.FastVisionModel.from_pretrained", SHIPPED)
    assert vision == names_of("unsloth.FastModel.from_pretrained", SHIPPED)
    assert "load_in_4bit" in vision
    assert known("unsloth.FastLanguageModel.get_peft_model", SHIPPED)["parameters"][:2] == [
        "model",
        "r",
    ]


FILES = {
    "trl.yaml": "model_name_or_path: tiny-llama-3m\ndataset_name: d\nnum_processes: 1\n",
    "lf.yaml": (
        "model_name_or_path: tiny-llama-3m\nstage: sft\ntemplate: llama3\noutput_dir: o\n"
        "finetuning_type: full\n"
    ),
    "axolotl.yml": (
        "base_model: tiny-llama-3m\ndatasets: []\nadapter: lora\nlora_r: 8\n"
        "lora_target_linear: true\nmicro_batch_size: 2\nsequence_len: 32\n"
    ),
}


@pytest.mark.parametrize(
    ("name", "key", "said", "length"),
    [
        ("trl.yaml", "max_seq_length: 8", "(until 0.19): use max_length", 8),
        ("trl.yaml", "max_lenght: 8", "did you mean max_length?", 1024),
        ("lf.yaml", "max_seq_length: 8", "LLaMA-Factory 0.9.5 has no max_seq_length: use cutof", 8),
        ("axolotl.yml", "max_seq_length: 8", ", and ignores it: use sequence_len", 32),
    ],
)
def test_a_key_that_a_tool_lacks_is_noted_with_its_line_and_costs_no_answer(
    tmp_path, name, key, said, length
):
    (tmp_path / name).write_text(f"{FILES[name]}{key}\n")
    plan = plan_program(read_program((name,), tmp_path, is_run=False))
    line = len(FILES[name].splitlines()) + 1
    [note] = [note for note in plan.notes if f"{name}:{line}: " in note]
    assert said in note
    assert plan.configuration["max_length"] == length


def test_a_tools_own_keys_are_no_note(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        plan = plan_program(read_program((name,), tmp_path, is_run=False))
        assert not [note for note in plan.notes if " has no " in note]


def test_a_key_that_no_release_has_leaves_the_training_unknown(tmp_path):
    (tmp_path / "lf.yaml").write_text(FILES["lf.yaml"] + "tensor_model_parallel_size: 4\n")
    with pytest.raises(UndecidedError, match="has no tensor_model_parallel_size"):
        plan_program(read_program(("lf.yaml",), tmp_path, is_run=False))
