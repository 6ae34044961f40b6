"""`tuner export`: each tool's settings go through that tool's own parser, or its list of keys."""

import ast
import importlib.util
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tuner.app.cli.main import run
from tuner.core.records import Configuration
from tuner.program.export import FORMATS, command_line, export
from tuner.space import configure, default_space, load_space
from tuner.space.apply import is_meant

ROOT = Path(__file__).parents[2]
TARGET = ["--space", "qlora27b", "--gpu", "a6000"]

QLORA = {
    "micro_batch": 2,
    "effective_batch": 32,
    "grad_accum": 16,
    "lora_rank": 128,
    "lora_alpha": 256,
    "lora_dropout": 0.05,
    "lora_targets": ("q_proj", "v_proj"),
    "max_length": 1024,
    "precision": "nf4",
    "mixed_precision": "bf16",
    "compute_dtype": "auto",
    "double_quant": True,
    "kbit_preparation": "peft",
    "loss": "transformers",
    "fused_loss": False,
    "gradient_checkpointing": True,
    "optimizer": "paged_adamw_8bit",
    "attention": "sdpa",
    "max_grad_norm": 0.3,
    "training_loop": "trainer",
}
VARIANTS = [
    {},
    {"precision": "int8", "mixed_precision": "fp16", "attention": "eager"},
    {"precision": "bf16", "lora_targets": ("all-linear",), "gradient_checkpointing": False},
    {"precision": "fp32", "mixed_precision": "no", "optimizer": "sgd", "max_grad_norm": 0.0},
    {"num_workers": 2, "prefetch_factor": 4, "pin_memory": True, "torch_compile": False},
    {"modules_to_save": ("embed_tokens", "lm_head"), "padding": "max_length"},
    {"modules_to_save": ("none",), "padding": "none"},
]

# The keys that a tool takes, where it is not installed.
# DeepSpeed 0.19.8: deepspeed/runtime/constants.py and deepspeed/runtime/zero/config.py.
DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
    "zero_optimization",
}
# LLaMA-Factory 0.9.5: src/llamafactory/hparams/{model,finetuning,data}_args.py; what else it
# takes is a field of transformers' TrainingArguments.
LLAMAFACTORY = {
    "model_name_or_path",
    "flash_attn",
    "disable_gradient_checkpointing",
    "use_reentrant_gc",
    "quantization_method",
    "quantization_bit",
    "quantization_type",
    "double_quantization",
    "lora_alpha",
    "lora_dropout",
    "lora_rank",
    "lora_target",
    "additional_target",
    "pure_bf16",
    "stage",
    "finetuning_type",
    "cutoff_len",
}


def subject(**changes: object) -> tuple:
    configuration = Configuration({**QLORA, **changes})
    flags = {name: configuration[name] for name in ("micro_batch", "lora_targets", "double_quant")}
    return configuration, "causal_lm", "org/model", "a title", (command_line(flags), {})


def settings(name: str, **changes: object) -> dict:
    return yaml.safe_load(export(name, *subject(**changes)).text)  # JSON is YAML


def python_settings(**changes: object) -> dict:
    tree = ast.parse(export("trainer", *subject(**changes)).text)
    return {node.targets[0].id: ast.literal_eval(node.value) for node in tree.body}


@pytest.mark.parametrize("changes", VARIANTS)
def test_trainer_settings_construct_what_they_are_for(changes, tmp_path):
    import torch
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, TrainingArguments

    parts = python_settings(**changes)
    mixed = {**QLORA, **changes}["mixed_precision"]
    # Only a GPU trains in fp16; every other argument is checked by transformers itself.
    arguments = TrainingArguments(
        **{**parts["TRAINING"], "fp16": False}, use_cpu=True, output_dir=str(tmp_path)
    )
    assert parts["TRAINING"]["fp16"] == (mixed == "fp16")
    assert arguments.bf16 == (mixed == "bf16")
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 32
    assert arguments.optim == {**QLORA, **changes}["optimizer"]
    assert arguments.gradient_checkpointing == {**QLORA, **changes}["gradient_checkpointing"]
    lora = LoraConfig(**parts["LORA"])
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (128, 256, 0.05)
    assert hasattr(torch, parts["MODEL"]["dtype"])
    precision = {**QLORA, **changes}["precision"]
    assert ("QUANTIZATION" in parts) == (precision in ("nf4", "int8"))
    if "QUANTIZATION" in parts:
        quantization = BitsAndBytesConfig(**parts["QUANTIZATION"])
        assert (quantization.load_in_4bit, quantization.load_in_8bit) == (
            precision == "nf4",
            precision == "int8",
        )


@pytest.mark.parametrize("precision", ["nf4", "int8", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("preparation", ["peft", "trl", "none"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_trainers_file_names_what_it_has_and_prepares_what_is_quantised(
    precision, preparation, checkpointing
):
    """Every `**NAME` of the first lines is there; only quantised models are prepared."""
    changes = {
        "precision": precision,
        "kbit_preparation": preparation,
        "gradient_checkpointing": checkpointing,
        "use_reentrant": True,
    }
    text = export("trainer", *subject(**changes)).text
    names = set(re.findall(r"\*\*([A-Z]+)", text))
    parts = python_settings(**changes)
    assert names == parts.keys()
    prepared = precision in ("nf4", "int8") and preparation == "peft"
    assert ("prepare_model_for_kbit_training" in text) == prepared
    assert ("PREPARATION" in parts) == prepared
    quantised = precision in ("nf4", "int8")
    assert ("kbit_preparation" in text) == (quantised and preparation == "trl")
    if prepared:
        from peft import prepare_model_for_kbit_training

        assert parts["PREPARATION"]["use_gradient_checkpointing"] is checkpointing
        assert parts["PREPARATION"].keys() <= set(
            inspect.signature(prepare_model_for_kbit_training).parameters
        )
        kwargs = parts["PREPARATION"].get("gradient_checkpointing_kwargs")
        assert kwargs == ({"use_reentrant": True} if checkpointing else None)


def test_trl_says_which_loss_was_priced():
    left_out = export("trl", *subject()).left_out
    assert any(
        line.startswith("loss = transformers: ") and "whole logits" in line for line in left_out
    )
    assert any(line.startswith("adapter_dtype = fp32: ") for line in left_out)
    assert settings("trl")["loss_type"] == "nll"
    same = {"loss": "chunked", "adapter_dtype": "bf16"}
    left_out = export("trl", *subject(**same)).left_out
    assert not any(line.startswith(("loss", "adapter_dtype")) for line in left_out)
    plain = export("trl", *subject(precision="bf16")).left_out
    assert not any(line.startswith("adapter_dtype") for line in plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_every_format_that_checkpoints_says_how(reentrant):
    changes = {"use_reentrant": reentrant}
    for name in ("trl", "axolotl"):
        found = settings(name, **changes)["gradient_checkpointing_kwargs"]
        assert found == {"use_reentrant": reentrant}
    training = python_settings(**changes)["TRAINING"]
    assert training["gradient_checkpointing_kwargs"] == {"use_reentrant": reentrant}
    assert settings("llamafactory", **changes)["use_reentrant_gc"] == reentrant
    for name in ("accelerate", "deepspeed"):
        left_out = export(name, *subject(**changes)).left_out
        assert any(line.startswith("use_reentrant = ") for line in left_out), name


def test_what_concerns_the_machine_goes_to_trainer_where_a_space_has_it(tmp_path):
    from transformers import TrainingArguments

    machine = {"num_workers": 2, "prefetch_factor": 4, "pin_memory": False, "allocator": "a:1"}
    training = python_settings(**machine, persistent_workers=True)["TRAINING"]
    arguments = TrainingArguments(**training, use_cpu=True, output_dir=str(tmp_path))
    assert arguments.dataloader_num_workers == 2
    assert arguments.dataloader_prefetch_factor == 4
    assert not arguments.dataloader_pin_memory
    assert arguments.dataloader_persistent_workers
    left_out = export("trl", *subject(**machine)).left_out
    assert "allocator = a:1: set PYTORCH_CUDA_ALLOC_CONF in the environment" in left_out
    single = python_settings(num_workers=0, prefetch_factor=4)["TRAINING"]
    TrainingArguments(**single, use_cpu=True, output_dir=str(tmp_path))
    assert "dataloader_num_workers" not in settings("trl")


@pytest.mark.parametrize(
    ("changes", "kind", "sharded"),
    [
        ({"gpus_per_trial": 2}, "MULTI_GPU", {}),
        ({"gpus_per_trial": 8, "distributed": "fsdp2"}, "FSDP", {}),
        (
            {"gpus_per_trial": 16, "machines": 2, "distributed": "hsdp"},
            "FSDP",
            {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8},
        ),
    ],
)
def test_accelerate_is_told_of_all_gpus(changes, kind, sharded, tmp_path):
    from accelerate.commands.config.config_args import ClusterConfig

    path = tmp_path / "accelerate.yaml"
    made = export("accelerate", *subject(**changes))
    path.write_text(made.text)
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.distributed_type == kind
    assert config.num_processes == changes["gpus_per_trial"]
    assert config.num_machines == changes.get("machines", 1)
    assert config.parallelism_config == sharded
    assert config.fsdp_config.get("fsdp_version") == (2 if kind == "FSDP" else None)
    said = ("machines", "distributed", "dp_shard_size")
    assert not [line for line in made.left_out if line.startswith(said)]
    assert any("the launcher" in line for line in export("trl", *subject(**changes)).left_out)


@pytest.mark.parametrize("changes", VARIANTS)
def test_trl_reads_its_file(changes, tmp_path):
    pytest.importorskip("trl", reason="trl is not installed: its own parser cannot be asked")
    from transformers import HfArgumentParser
    from trl import ModelConfig, SFTConfig

    path = tmp_path / "sft.yaml"
    # The CPU of a test machine trains neither in fp16 nor with CUDA's bf16 check.
    found = {**settings("trl", **changes), "use_cpu": True, "output_dir": str(tmp_path)}
    path.write_text(yaml.safe_dump({**found, "fp16": False}))
    training, model = HfArgumentParser((SFTConfig, ModelConfig)).parse_yaml_file(str(path))
    assert training.max_length == 1024
    assert (model.lora_r, model.lora_alpha) == (128, 256)
    assert training.gradient_checkpointing == {**QLORA, **changes}["gradient_checkpointing"]


@pytest.mark.parametrize("changes", VARIANTS)
def test_axolotl_validates_its_file(changes):
    pytest.importorskip(
        "axolotl.utils.schemas.config", reason="axolotl is not installed: no schema to ask"
    )
    from axolotl.utils.schemas.config import AxolotlInputConfig

    found = settings("axolotl", **changes)
    assert found.keys() <= AxolotlInputConfig.model_fields.keys()
    data = {"datasets": [{"path": "x", "type": "alpaca"}], "learning_rate": 1e-4}
    checked = AxolotlInputConfig.model_validate({**found, **data})
    assert (checked.micro_batch_size, checked.sequence_len, checked.lora_r) == (2, 1024, 128)


@pytest.mark.parametrize("changes", VARIANTS)
def test_llamafactory_knows_every_key(changes):
    from transformers import TrainingArguments

    known = LLAMAFACTORY | TrainingArguments.__dataclass_fields__.keys()
    found = settings("llamafactory", **changes)
    assert found.keys() <= known
    assert found["flash_attn"] in {"auto", "disabled", "sdpa", "fa2", "fa3"}
    assert found.get("quantization_bit") in {None, 4, 8}


def test_the_keys_of_llamafactory_are_those_of_the_installed_one():
    spec = importlib.util.find_spec("llamafactory")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("llamafactory is not installed: its arguments cannot be read")
    fields: set[str] = set()
    for path in Path(spec.submodule_search_locations[0], "hparams").glob("*_args.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
    assert fields >= LLAMAFACTORY


@pytest.mark.parametrize("changes", VARIANTS)
def test_deepspeed_knows_every_key(changes):
    found = json.loads(export("deepspeed", *subject(**changes)).text)
    assert found.keys() <= DEEPSPEED
    assert found["train_batch_size"] == (
        found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    )
    assert found["bf16"]["enabled"] == ({**QLORA, **changes}["mixed_precision"] == "bf16")


def test_zero_is_said_by_every_tool_that_starts_deepspeed(tmp_path):
    from accelerate.commands.config.config_args import ClusterConfig

    ranks = {"gpus_per_trial": 4, "distributed": "zero2", "reduce_bucket_size": 5_000_000}
    zero = {"stage": 2, "reduce_bucket_size": 5_000_000}
    found = settings("deepspeed", **ranks)
    assert found["zero_optimization"] == zero
    for own in (python_settings(**ranks)["TRAINING"], *map(_with(ranks), ("trl", "axolotl"))):
        assert own["deepspeed"]["zero_optimization"] == zero
        assert own["deepspeed"]["gradient_clipping"] == "auto"
    path = tmp_path / "accelerate.yaml"
    path.write_text(export("accelerate", *subject(**ranks)).text)
    launch = ClusterConfig.from_yaml_file(yaml_file=str(path))
    assert launch.num_processes == 4
    assert launch.distributed_type == "DEEPSPEED"
    assert launch.deepspeed_config["zero_stage"] == 2
    for name in ("deepspeed", "trl", "axolotl", "llamafactory"):
        left = export(name, *subject(**ranks)).left_out
        assert any(line.startswith("gpus_per_trial = 4: belongs to the launcher") for line in left)
        assert not any(line.startswith("distributed") for line in left), name


def _with(changes):
    return lambda name: settings(name, **changes)


# What must be in a format's text for the value of a name to be said there.
WITNESSES = {
    "micro_batch": 37,
    "grad_accum": 41,
    "lora_rank": 43,
    "lora_alpha": 47,
    "lora_dropout": 0.53,
    "max_length": 59,
    "max_grad_norm": 0.61,
}


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "command"])
def test_a_value_is_written_or_named_as_left_out(name):
    exported = export(name, *subject(**WITNESSES))
    body = exported.text.split("\n\n", 1)[-1] if exported.text.startswith("#") else exported.text
    left_out = {line.partition(" ")[0] for line in exported.left_out}
    for knob, value in WITNESSES.items():
        assert (knob in left_out) != (str(value) in body), knob


def test_tools_are_told_to_train_all_weights():
    full = {"lora_rank": 0, "precision": "bf16", "mixed_precision": "bf16"}
    assert settings("llamafactory", **full)["finetuning_type"] == "full"
    assert settings("llamafactory", **full)["pure_bf16"] is True
    wide = {**full, "precision": "fp32"}
    assert settings("llamafactory", **wide)["pure_bf16"] is False
    assert not any(
        "precision" in line for line in export("llamafactory", *subject(**wide)).left_out
    )
    assert settings("trl", **full)["use_peft"] is False
    assert "LORA" not in python_settings(**full)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("name", ["trl", "llamafactory", "axolotl", "trainer"])
def test_the_kind_of_adapter_is_said(name, kind):
    exported = export(name, *subject(adapter=kind))
    left_out = [line for line in exported.left_out if line.startswith("adapter =")]
    assert not left_out
    assert (f"use_{kind}" in exported.text) == (kind != "lora")


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_is_left_out_is_said_in_the_file_too(name):
    exported = export(
        name, *subject(optimizer="sgd", loss="transformers_4_46", kbit_preparation="none")
    )
    has_comments = FORMATS[name].suffix in (".yaml", ".py")
    for line in exported.left_out if has_comments else ():
        assert f"#   {line}" in exported.text
    if name != "command":
        assert any(line.startswith("loss = transformers_4_46") for line in exported.left_out)


def test_every_name_of_the_vocabulary_is_accounted_for():
    """A term that is added later is left out visibly until a format says it."""
    space = default_space("qwen2.5-0.5b")
    configuration = configure(space)
    for name in FORMATS:
        found = configuration.replace(new_term=7)
        left_out = export(name, found, "causal_lm", None, "t").left_out
        assert name == "command" or any(line.startswith("new_term = 7:") for line in left_out)


def test_a_tool_for_language_models_refuses_other_workloads():
    from tuner.core.errors import InputError

    with pytest.raises(InputError, match="does not train workload 'contrastive'"):
        export("axolotl", Configuration({"micro_batch": 2}), "contrastive", None, "t")


@pytest.fixture
def committed(monkeypatch):
    monkeypatch.chdir(ROOT)
    return load_space("qlora27b")


def test_committed_result_exports(committed, capsys, tmp_path):
    command = ["export", *TARGET, "--format", "trl"]
    assert run(command) == 0
    printed = capsys.readouterr()
    file = tmp_path / "out"
    assert run([*command, "--output", str(file)]) == 0
    assert file.read_text() == printed.out
    assert capsys.readouterr().out == ""
    assert run([*command, "--output", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_options_take_the_names_of_the_spaces_table(committed, capsys):
    assert run(["export", *TARGET, "--format", "command"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("--batch ")
    assert "--max_length 1024" in printed.out
    assert "not said: attention = " in printed.err


def test_the_command_of_the_space_is_printed_with_its_values(tmp_path, monkeypatch, capsys):
    from cli_samples import make_trial, write_samples

    from tuner.searches.store import ResultsFolder

    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    space = (
        "name: tiny\ndescription: a command\n"
        "command: [python3, train.py, --batch, '{micro_batch}', --name, a b]\n"
        "env: {RANK: '{lora_rank}'}\n"
        "knobs: {micro_batch: [1, 2], lora_rank: [4, 8], attention: [sdpa, eager]}\n"
        "baseline: {micro_batch: 1, lora_rank: 4, attention: sdpa}\n"
    )
    (tmp_path / "tiny.yaml").write_text(space)
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        writer.append(make_trial(tmp_path, 20, 100, micro_batch=2, lora_rank=8, attention="sdpa"))
    command = ["export", "--space", "tiny.yaml", "--gpu", "a6000", "--format", "command"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert printed.out == "RANK=8 python3 train.py --batch 2 --name 'a b'\n"
    assert "not said: attention = sdpa: the command has no place for it" in printed.err
    assert "micro_batch" not in printed.err


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "search_spaces").glob("*.yaml")))
def test_what_best_suggests_works(name, monkeypatch, capsys):
    """Each line below `use` names a file of a mapping, and a tool that trains the space.

    The trial that verifies is one of the recommended configuration.
    """
    from tuner.app.cli.answers import use_commands, verify_command
    from tuner.app.cli.trial import command
    from tuner.app.recommendation import recommended
    from tuner.app.target import load_targets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tuner.app.cli.answers.can_emulate", lambda gpu: True)
    gpu = next((p.name for p in (ROOT / "results" / name).glob("*") if p.is_dir()), None)
    if gpu is None or gpu == "cpu":
        pytest.skip("no results of a GPU ship")
    target = load_targets(name, [gpu])[0]
    for line in use_commands(target):
        words = shlex.split(line)[1:]
        if words[0] == "export":
            assert run(words) == 0
        else:
            meant = Path(words[-1])
            mappings = target.space.apply.values()
            assert any(is_meant(meant, m.files) for m in mappings)
    capsys.readouterr()
    best = recommended(target)
    words = shlex.split(verify_command(target, best))[2:]
    if words:
        values = command.make_context("trial", words).params
        assert (values["mode"], values["gpu_name"]) == ("emulate", gpu)
        space = load_space(values["space"])
        assert configure(space, values["settings"]) == best.configuration
