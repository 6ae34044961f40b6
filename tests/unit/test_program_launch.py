"""How a program is started: the number of its ranks, and how they share the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tuner.core.errors import InputError
from tuner.core.setup.distributed_knobs import most_gpus_per_trial
from tuner.program.launch import Launch, read_launch
from tuner.program.planned import ProgramPlan, plan_program
from tuner.program.program import read_program
from tuner.program.settings import settings_of
from tuner.program.space_text import knobs_of, space_text
from tuner.space import load_space
from tuner.space.models.catalogue import resolve_config

SFT = """\
from trl import SFTConfig, SFTTrainer
SFTTrainer(model='tiny-llama-3m', args=SFTConfig({})).train()
"""
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
FSDP2 = ("--use_fsdp", "--fsdp_version=2", "--fsdp-auto-wrap-policy", "TRANSFORMER_BASED_WRAP")


def launched(folder: Path, *words: str, arguments: str = "") -> Launch:
    (folder / "train.py").write_text(SFT.format(arguments))
    return read_launch(read_program((*words, "train.py"), folder, is_run=False))


def planned(folder: Path, *words: str, arguments: str = "", gpus: int | None = None) -> ProgramPlan:
    (folder / "train.py").write_text(SFT.format(arguments))
    program = read_program((*words, "train.py"), folder, is_run=False)
    return plan_program(program, gpus=gpus)


def refusals(folder: Path, *words: str, **more) -> str:
    with pytest.raises(InputError) as caught:
        planned(folder, *words, **more)
    return "; ".join(map(str, caught.value.problems))


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """accelerate's configuration file, and no other one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    path = tmp_path / "fsdp.yaml"
    path.write_text(FSDP)
    return path


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("python",), 1),
        (("torchrun", "--nproc-per-node", "8"), 8),
        (("torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts", "3"), 2),
        (("torchrun",), 1),
        (("torchrun", "--nproc-per-node", "gpu"), None),
        (("python", "-m", "torch.distributed.run", "--nproc-per-node", "4"), 4),
        (("uv", "run", "torchrun", "--nproc-per-node=2"), 2),
        (("accelerate", "launch", "--num_processes", "4", "--multi_gpu"), 4),
        (("accelerate", "launch"), None),
        (("accelerate-launch", "--num_processes", "2", "--mixed_precision=bf16"), 2),
        (("mpirun", "-np", "3", "python"), 3),
        (("CUDA_VISIBLE_DEVICES=0,1", "accelerate", "launch"), 2),
        (("env", "CUDA_VISIBLE_DEVICES=3", "torchrun", "--nproc-per-node", "gpu"), 1),
        (("python", "-m", "accelerate.commands.launch", "--num-processes=2"), 2),
        (("deepspeed", "--num_gpus", "8"), 8),
        (("deepspeed", "--include", "localhost:0,1,2"), 3),
        (("deepspeed",), None),
    ],
)
def test_the_number_of_ranks_is_what_the_launcher_starts(tmp_path, config, words, ranks):
    found = launched(tmp_path, *words)
    assert (found.processes, found.problems) == (ranks, [])


def test_ranks_under_torchrun_replicate_the_model(tmp_path):
    plan = planned(tmp_path, "torchrun", "--nproc-per-node", "8")
    assert (plan.configuration["gpus_per_trial"], plan.configuration["distributed"]) == (8, "ddp")
    assert plan.configuration["effective_batch"] == 8 * 8


def test_the_file_of_accelerate_says_how_ranks_share_the_model(tmp_path, config):
    plan = planned(tmp_path, "accelerate", "launch", "--config_file", "fsdp.yaml")
    assert (plan.configuration["gpus_per_trial"], plan.configuration["distributed"]) == (4, "fsdp2")
    assert "reshard_after_forward" not in plan.configuration


@pytest.mark.parametrize(
    "words",
    [
        ("torchrun", "--nnodes", "2", "--nproc-per-node=8"),
        ("accelerate", "launch", "--num_machines=2", "--num_processes=16", "--multi_gpu"),
        ("deepspeed", "--num_nodes=2", "--num_gpus=8"),
    ],
)
def test_ranks_of_several_machines_are_counted_together(tmp_path, config, words):
    found = planned(tmp_path, *words).configuration
    assert (found["gpus_per_trial"], found["machines"]) == (16, 2)
    assert found["effective_batch"] == 16 * 8


def test_without_a_name_it_is_the_file_that_accelerate_config_wrote(tmp_path, config, monkeypatch):
    own = tmp_path / "home" / "accelerate" / "default_config.yaml"
    own.parent.mkdir(parents=True)
    config.rename(own)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert planned(tmp_path, "accelerate", "launch").configuration["gpus_per_trial"] == 4


def test_options_of_accelerate_count_more_than_its_file(tmp_path, config):
    words = ("accelerate", "launch", "--config_file", "fsdp.yaml", "--num_processes", "2")
    more = ("--fsdp_reshard_after_forward", "false")
    plan = planned(tmp_path, *words, *more)
    assert plan.configuration["gpus_per_trial"] == 2
    assert plan.configuration["reshard_after_forward"] is False


def test_trainer_takes_the_launchers_mixed_precision_where_it_has_none(tmp_path, config):
    words = ("accelerate", "launch", *FSDP2, "--num_processes", "2", "--mixed_precision", "bf16")
    text = "from transformers import Trainer, TrainingArguments\n"
    text += "from transformers import AutoModelForCausalLM\n"
    text += "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m')\n"
    text += "Trainer(model, args=TrainingArguments('out'), train_dataset=None).train()\n"
    (tmp_path / "own.py").write_text(text)
    program = read_program((*words, "own.py"), tmp_path, is_run=False)
    plan = plan_program(program, {"max_length": 64})
    assert plan.configuration["mixed_precision"] == "bf16"
    assert "mixed_precision=no" not in plan.assumed


def test_trl_hands_its_options_on_to_accelerate(tmp_path, config):
    text = "model_name_or_path: tiny-llama-3m\ndataset_name: d\nnum_processes: 3\n"
    (tmp_path / "sft.yaml").write_text(text)
    words = ("trl", "sft", "--config", "sft.yaml")
    plan = plan_program(read_program(words, tmp_path, is_run=False))
    assert plan.configuration["gpus_per_trial"] == 3
    words = (*words, "--accelerate_config", "fsdp2", "--num_processes", "2")
    plan = plan_program(read_program(words, tmp_path, is_run=False))
    assert (plan.configuration["gpus_per_trial"], plan.configuration["distributed"]) == (2, "fsdp2")
    assert not plan.left_out


@pytest.mark.parametrize("by", ["-m", "--module"])
def test_a_script_of_trl_is_started_as_a_module(tmp_path, config, by):
    words = ("accelerate", "launch", "--num_processes=2", by, "trl.scripts.sft")
    said = ("--model_name_or_path=tiny-llama-3m", "--dataset_name=d", "--max_length=64")
    plan = plan_program(read_program((*words, *said), tmp_path, is_run=False))
    assert (plan.configuration["gpus_per_trial"], plan.configuration["max_length"]) == (2, 64)


def test_visible_gpus_of_one_process_are_refused(tmp_path, config):
    assert "starts one process on 2 GPUs" in refusals(
        tmp_path, "CUDA_VISIBLE_DEVICES=0,1", "python"
    )


TOOLS = {
    "axolotl.yaml": "base_model: tiny-llama-3m\nadapter: lora\nlora_target_linear: true\n",
    "factory.yaml": "model_name_or_path: tiny-llama-3m\nstage: sft\nbf16: true\nlora_target: all\n",
    "sft.yaml": "model_name_or_path: tiny-llama-3m\ndataset_name: d\n",
}


@pytest.mark.parametrize(
    ("command", "ranks", "knob", "value"),
    [
        ("python -m axolotl.cli.train axolotl.yaml --sequence-len 64", 1, "max_length", 64),
        (
            "accelerate launch --num_processes 2 -m axolotl.cli.train axolotl.yaml",
            2,
            "lora_rank",
            8,
        ),
        ("llamafactory-cli train factory.yaml cutoff_len=64", 1, "max_length", 64),
        ("NPROC_PER_NODE=2 llamafactory-cli train factory.yaml", 2, "max_length", 2048),
        ("python -m llamafactory.cli train factory.yaml", 1, "max_length", 2048),
        (
            "torchrun --nproc_per_node=2 src/train.py factory.yaml cutoff_len=64",
            2,
            "max_length",
            64,
        ),
        ("trl sft --config sft.yaml --max_length 64", 1, "max_length", 64),
        ("trl dpo --config sft.yaml --num_processes 2", 2, "micro_batch", 16),
        ("trl reward --config sft.yaml --max_seq_length 64", 1, "max_length", 64),
        ("bash run.sh 64", 2, "max_length", 64),
    ],
)
def test_a_tool_is_read_however_it_is_started(tmp_path, config, command, ranks, knob, value):
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "src").mkdir()
    run_exp = "from llamafactory.train.tuner import run_exp\nrun_exp()\n"
    (tmp_path / "src" / "train.py").write_text(run_exp)
    (tmp_path / "run.sh").write_text("trl sft --config sft.yaml --max_length $1 --num_processes 2")
    plan = plan_program(read_program(command.split(), tmp_path, is_run=False))
    assert plan.configuration.get("gpus_per_trial", 1) == ranks
    assert plan.configuration[knob] == value


@pytest.mark.parametrize("config_file", [True, False])
def test_fsdps_own_checkpointing_is_checkpointing(tmp_path, config, config_file):
    if config_file:
        config.write_text(FSDP + "  fsdp_activation_checkpointing: true\n")
        words = ("accelerate", "launch", "--config_file", "fsdp.yaml")
        plan = planned(tmp_path, *words, arguments="gradient_checkpointing=False")
    else:
        arguments = "gradient_checkpointing=False, fsdp=True, "
        arguments += "fsdp_config={'activation_checkpointing': True}"
        plan = planned(tmp_path, "torchrun", "--nproc-per-node=2", arguments=arguments)
    assert plan.configuration["gradient_checkpointing"] is True
    assert plan.configuration["distributed"] == "fsdp2"


def test_both_ways_of_checkpointing_are_what_the_trainer_refuses(tmp_path, config):
    config.write_text(FSDP + "  fsdp_activation_checkpointing: true\n")
    text = refusals(tmp_path, "accelerate", "launch", "--config_file", "fsdp.yaml")
    assert "both true" in text


def test_fsdp_of_training_arguments_is_read(tmp_path):
    words = ("torchrun", "--nproc-per-node=2")
    plan = planned(tmp_path, *words, arguments="fsdp='shard_grad_op auto_wrap'")
    assert plan.configuration["distributed"] == "fsdp2"
    assert plan.configuration["reshard_after_forward"] is False
    assert not plan.left_out


@pytest.mark.parametrize(
    ("words", "arguments", "said"),
    [
        (("torchrun", "--nproc-per-node=some"), "", "'some'"),
        (("accelerate", "launch", "--use_fsdp", "--num_processes=2"), "", "FSDP1"),
        (("accelerate", "launch", "--use_megatron_lm", "--num_processes=2"), "", "Megatron"),
        (("accelerate", "launch", "--num_processes=2", "--dynamo_backend=eager"), "", "is eager"),
        (("accelerate", "launch", "--config_file", "gone.yaml"), "", "gone.yaml: cannot be read"),
        (("torchrun", "--nproc-per-node=2"), "fsdp='full_shard offload'", "offload of weights"),
        (("torchrun", "--nproc-per-node=2"), "fsdp='hybrid_shard'", "hybrid_shard"),
        (("torchrun", "--nproc-per-node=2"), "fsdp=True, fsdp_config='a.json'", "a.json"),
        (("python",), "fsdp=True", "fsdp2: is of one process"),
    ],
)
def test_what_is_not_predicted_is_refused_with_its_name(tmp_path, config, words, arguments, said):
    assert said in refusals(tmp_path, *words, arguments=arguments)


@pytest.mark.parametrize("count", [1, 2])
def test_dynamo_of_accelerate_compiles(tmp_path, config, count):
    words = ("accelerate", "launch", f"--num_processes={count}", "--dynamo_backend=inductor")
    assert planned(tmp_path, *words).configuration["torch_compile"] is True


def test_compiling_of_shards_is_named_and_not_modelled(tmp_path):
    arguments = "torch_compile=True, fsdp='full_shard'"
    plan = planned(tmp_path, "torchrun", "--nproc-per-node=2", arguments=arguments)
    assert plan.configuration["torch_compile"] is True
    [text] = plan.at_most
    assert text.startswith("torch.compile isn't modelled, and only saves memory; speed: ")


def test_one_process_on_several_gpus_is_refused(tmp_path):
    assert "DataParallel" in refusals(tmp_path, "python", gpus=2)


def test_ranks_that_are_not_the_gpus_are_refused(tmp_path):
    assert "--gpus is 2" in refusals(tmp_path, "torchrun", "--nproc-per-node=8", gpus=2)


def test_the_file_of_a_tool_is_trained_on_all_gpus(tmp_path):
    (tmp_path / "sft.yaml").write_text("model_name_or_path: tiny-llama-3m\ndataset_name: d\n")
    program = read_program(("sft.yaml",), tmp_path, is_run=False)
    assert plan_program(program, gpus=4).configuration["gpus_per_trial"] == 4
    assert "gpus_per_trial" not in plan_program(program).configuration


def test_the_newer_word_for_checkpointing_is_read(tmp_path):
    plan = planned(tmp_path, "python", arguments="activation_checkpointing=False")
    assert plan.configuration["gradient_checkpointing"] is False
    arguments = "activation_checkpointing=True, "
    arguments += "activation_checkpointing_kwargs={'use_reentrant': True}"
    plan = planned(tmp_path, "python", arguments=arguments)
    assert plan.configuration["use_reentrant"] is True
    assert not plan.left_out


def test_the_space_of_a_program_keeps_the_batch_of_all_ranks(tmp_path, config):
    arguments = "per_device_train_batch_size=4, gradient_accumulation_steps=2"
    (tmp_path / "train.py").write_text(SFT.format(arguments))
    words = ("accelerate", "launch", "--config_file", "fsdp.yaml", "train.py")
    program = read_program(words, tmp_path, is_run=False)
    settings = settings_of(program)
    knobs = knobs_of(settings, {}, ["micro_batch=1,2,4"])
    text = space_text("mine", words, settings, {}, knobs, fits=True)
    (tmp_path / "mine.yaml").write_text(text)
    space = load_space(str(tmp_path / "mine.yaml"))
    assert "description: settings of train.py" in text
    assert most_gpus_per_trial(space.choices, space.fixed) == 4
    found = list(space.configurations())
    assert [(c["micro_batch"], c["grad_accum"]) for c in found] == [(1, 8), (2, 4), (4, 2)]
    assert space.command is not None
    assert [space.command.samples(c) for c in found] == [32, 32, 32]


ZERO = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}


def with_zero(folder: Path, **settings: object) -> None:
    zero = {**ZERO["zero_optimization"], **settings}
    (folder / "ds.json").write_text(json.dumps({**ZERO, "zero_optimization": zero}))


def test_the_file_of_deepspeed_says_which_stage_it_is(tmp_path):
    with_zero(tmp_path, reduce_bucket_size=2e8, contiguous_gradients=True)
    plan = planned(tmp_path, "deepspeed", "--num_gpus=2", arguments="deepspeed='ds.json'")
    found = plan.configuration
    assert (found["distributed"], found["gpus_per_trial"]) == ("zero2", 2)
    assert (found["reduce_bucket_size"], plan.left_out) == (200_000_000, ())


def test_deepspeeds_settings_in_the_program_count_as_those_of_its_file(tmp_path):
    with_zero(tmp_path, offload_optimizer={"device": "cpu"})
    settings = (tmp_path / "ds.json").read_text().replace("true", "True")
    plan = planned(tmp_path, "deepspeed", "--num_gpus=2", arguments=f"deepspeed={settings}")
    assert plan.configuration["distributed"] == "zero2"
    assert "deepspeed zero_optimization.offload_optimizer" in plan.at_most[0]


def test_a_bucket_that_trainer_fills_in_is_the_square_of_the_hidden_size(tmp_path):
    with_zero(tmp_path, reduce_bucket_size="auto")
    plan = planned(tmp_path, "torchrun", "--nproc-per-node=2", arguments="deepspeed='ds.json'")
    hidden = resolve_config("tiny-llama-3m").hidden_size
    assert plan.configuration["reduce_bucket_size"] == hidden**2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_tells_deepspeed_its_stage(tmp_path, config, stage):
    zero = {"zero_stage": stage, "offload_optimizer_device": "none", "zero3_init_flag": False}
    told = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": zero}
    config.write_text(yaml.safe_dump(told))
    plan = planned(tmp_path, "accelerate", "launch", "--config_file", "fsdp.yaml")
    assert plan.configuration["distributed"] == f"zero{stage}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 0}, "zero_optimization.stage: is 0"),
        ({"overlap_comm": True, "reduce_bucket_size": "auto"}, "overlap_comm: is True; predicted"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights: is True; not predicted"),
    ],
)
def test_what_of_deepspeed_is_not_predicted_is_refused(tmp_path, settings, said):
    with_zero(tmp_path, **settings)
    words = ("torchrun", "--nproc-per-node=2")
    assert said in refusals(tmp_path, *words, arguments="deepspeed='ds.json'")


def test_deepspeeds_own_optimizer_and_other_types_are_refused(tmp_path):
    told = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
    (tmp_path / "ds.json").write_text(json.dumps(told))
    text = refusals(tmp_path, "torchrun", "--nproc-per-node=2", arguments="deepspeed='ds.json'")
    assert "DeepSpeed's own optimizer" in text
    assert "bf16: is not enabled" in text


OLDER = """\
from dataclasses import dataclass
import torch, trl
from transformers import AutoModelForCausalLM
@dataclass
class Own(trl.SFTConfig):
    extra: int = 0
model, args = trl.TrlParser((trl.ModelConfig, Own)).parse_args_and_config()
loaded = AutoModelForCausalLM.from_pretrained(
    model.model_name_or_path,
    torch_dtype=getattr(torch, model.torch_dtype),
    quantization_config=trl.get_quantization_config(model),
)
trl.SFTTrainer(loaded, args=args, peft_config=trl.get_peft_config(model)).train()
"""


def test_names_of_older_releases_are_what_they_are_called_now(tmp_path):
    settings = "model_name_or_path: tiny-llama-3m\ntorch_dtype: bfloat16\nmax_seq_length: 64\n"
    settings += "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_storage: null\n"
    (tmp_path / "own.yaml").write_text(settings)
    (tmp_path / "own.py").write_text(OLDER)
    words = ("accelerate", "launch", "own.py", "--config", "own.yaml")
    plan = plan_program(read_program(words, tmp_path, is_run=False))
    names = ("precision", "compute_dtype", "max_length")
    assert [plan.configuration[name] for name in names] == ["nf4", "bf16", 64]
