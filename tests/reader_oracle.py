"""What a program really trains with: it runs with the real libraries, and its training is stopped.

`python reader_oracle.py` answers each line of JSON, {"main", "folder", "argv", "env"}, with the
settings of the trainings that the program starts. The libraries, their configurations, their checks
and their trainers are real. The weights are of two small layers, the tokenizer and the data are
made up, and only the program is told that there is a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ARGUMENTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size",
    "max_length", "packing", "gradient_checkpointing", "optim", "bf16", "fp16", "learning_rate",
    "num_train_epochs", "max_steps", "weight_decay", "warmup_steps", "loss_type", "beta",
    "use_liger_kernel", "padding_free", "completion_only_loss", "eval_strategy", "seed",
    "num_generations", "max_completion_length", "neftune_noise_alpha",
)  # fmt: skip
ADAPTER = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "bias")
QUANTIZATION = (
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype",
)  # fmt: skip
LIMIT_S = 60


def plain(value: Any) -> Any:
    """JSON, with an enumeration as its value and a dtype as its short name."""
    value = getattr(value, "value", value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    simple = value is None or isinstance(value, bool | int | float | str | dict)
    return value if simple else str(value).removeprefix("torch.")


class Stopped:
    """Records trainings in place of running them."""

    def __init__(self) -> None:
        self.trainings: list[dict[str, Any]] = []

    def train(self, trainer: Any) -> Any:
        args, model = trainer.args, trainer.model
        settings = {name: plain(getattr(args, name)) for name in ARGUMENTS if hasattr(args, name)}
        # What is looked at, whatever the arguments say of it later.
        settings["gradient_checkpointing"] = args.activation_checkpointing
        settings["per_device_train_batch_size"] = trainer._train_batch_size
        settings["bf16"] = args.mixed_precision == "bf16"
        adapters = getattr(model, "peft_config", None)
        lora = next(iter(adapters.values())) if adapters else None
        base = model.get_base_model() if lora and hasattr(model, "get_base_model") else model
        given = getattr(base, "oracle_given", {})
        named = next(one for one in type(trainer).__mro__ if not one.__module__.startswith("__"))
        self.trainings.append(
            {
                "trainer": f"{named.__module__.partition('.')[0]}.{named.__name__}",
                **settings,
                "model": given.get("name"),
                "dtype": plain(given.get("dtype")),
                "attention": given.get("attention"),
                **dict.fromkeys(("load_in_4bit", "load_in_8bit"), False),
                **(given.get("quantization") or {}),
                "lora": lora is not None,
                **({name: plain(getattr(lora, name, None)) for name in ADAPTER} if lora else {}),
            }
        )
        for module in model.modules():  # whose rank counts, not that of an object set later
            if lora is not None and getattr(module, "lora_A", None):
                self.trainings[-1]["r"] = next(iter(module.lora_A.values())).weight.shape[0]
        from transformers.trainer_utils import TrainOutput

        return TrainOutput(1, 0.0, {})


def tiny_checkpoints(folder: Path) -> dict[str, Path]:
    """Checkpoints of two small layers, by family, each with a tokenizer."""
    import transformers as t
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: place for place, word in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    shape = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": len(words),
        "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    made = {}
    for family, config in {"qwen3": t.Qwen3Config, "llama": t.LlamaConfig}.items():
        made[family] = folder / family
        t.AutoModelForCausalLM.from_config(config(**shape)).save_pretrained(made[family])
        fast.save_pretrained(made[family])
    return made


def family_of(name: str) -> str:
    return "qwen3" if "qwen" in name.lower() else "llama"


SPLITS = ("train", "test", "validation", "train_sft", "test_sft")


def rows_of(text: str) -> Any:
    from datasets import Dataset

    said, answer = (
        [{"role": "user", "content": "What?"}],
        [{"role": "assistant", "content": "That."}],
    )
    if re.search(r"(DPO|Reward|ORPO|CPO)Trainer[()]", text):
        row: dict[str, Any] = {"prompt": said, "chosen": answer, "rejected": answer}
    elif re.search(r"(GRPO|RLOO)Trainer[()]", text):
        row = {"prompt": said}
    else:
        row = {"messages": said + answer}
        if re.search(r"\[.text.\]", text):
            row["text"] = "It is about memory."
    return Dataset.from_list([row] * 4)


def prepare(  # noqa: PLR0915 - the libraries that it imports are theirs
    folder: Path,
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Imports the libraries once; returns the function that runs a program in this process."""
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
         "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "0"}
    )  # fmt: skip
    import datasets
    import peft  # noqa: F401
    import torch
    import transformers
    import trl
    from transformers import modeling_utils, trainer, training_args
    from transformers.models.auto import auto_factory

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    checkpoints = tiny_checkpoints(folder)
    for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer", "KTOTrainer"):
        getattr(trl, name)  # each of their modules is imported once
    for module in (training_args, transformers.utils, transformers.utils.import_utils):
        module.is_torch_bf16_gpu_available = lambda: True
        module.is_torch_tf32_available = lambda: True
    training_args.enable_tf32 = lambda _: None

    def local(loader: Any, is_model: bool) -> Any:
        own = loader.__func__

        def load(cls: Any, name: Any, *args: Any, **given: Any) -> Any:
            if Path(str(name)).is_absolute():
                return own(cls, name, *args, **given)
            there = checkpoints[family_of(str(name))]
            for word in ("revision", "token", "cache_dir", "trust_remote_code", "use_fast"):
                given.pop(word, None)
            if not is_model:
                return own(cls, there, *args, **given)
            for word in ("device_map", "max_memory"):
                given.pop(word, None)
            config, quantized = given.get("config"), given.get("quantization_config")
            asked = getattr(config, "_attn_implementation_internal", None)
            model = own(cls, there, *args, **given)
            model.oracle_given = {
                "name": str(name),
                "dtype": given.get("dtype", given.get("torch_dtype")),
                "attention": given.get("attn_implementation", asked),
                "quantization": quantized
                and {one: plain(getattr(quantized, one)) for one in QUANTIZATION},
            }
            return model

        return classmethod(load)

    models = modeling_utils.PreTrainedModel
    models.from_pretrained = local(vars(models)["from_pretrained"], True)
    adjust = models._check_and_adjust_attn_implementation
    models._check_and_adjust_attn_implementation = lambda self, name, *a, **k: (
        name if "flash" in str(name) else adjust(self, name, *a, **k)
    )
    auto_factory.find_adapter_config_file = lambda *_, **__: None
    for one in (
        transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoProcessor,
        transformers.PreTrainedConfig, transformers.PreTrainedTokenizerBase,
        transformers.GenerationConfig,
    ):  # fmt: skip
        one.from_pretrained = local(vars(one)["from_pretrained"], False)

    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        stopped = Stopped()
        trainer.Trainer.train = lambda self, *_, **__: stopped.train(self)
        for name in ("save_model", "save_state", "push_to_hub", "evaluate", "log_metrics"):
            setattr(trainer.Trainer, name, lambda *_, **__: {})
        own = Path(job["folder"]).resolve()
        text = Path(job["main"]).read_text()
        datasets.load_dataset = lambda *_, **given: (
            rows_of(text)
            if given.get("split")
            else datasets.DatasetDict(dict.fromkeys(SPLITS, rows_of(text)))
        )

        def to_the_program(answer: Any, real: Any) -> Any:
            def ask(*args: Any, **given: Any) -> Any:
                caller = Path(sys._getframe(1).f_code.co_filename)
                return answer if caller.is_relative_to(own) else real(*args, **given)

            return ask

        for name, answer in {
            "is_available": True, "device_count": 1, "is_bf16_supported": True,
            "get_device_capability": (8, 9), "current_device": 0,
        }.items():  # fmt: skip
            setattr(torch.cuda, name, to_the_program(answer, getattr(torch.cuda, name)))
        os.chdir(own)
        os.environ.update(job.get("env") or {})
        sys.argv = [job["main"], *job.get("argv", [])]
        sys.path.insert(0, str(Path(job["main"]).parent))
        ended = None
        try:
            runpy.run_path(job["main"], run_name="__main__")
        except SystemExit as end:
            ended = f"exit {end.code}" if end.code else None
        except BaseException as error:  # noqa: BLE001 - the program's own
            ended = f"{type(error).__name__}: {error}"
            if os.environ.get("ORACLE_TRACE"):
                import traceback

                traceback.print_exc()
        return {"trainings": stopped.trainings, "ended": ended}

    return run


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as made:
        run = prepare(Path(made).resolve())
        for line in sys.stdin:
            ours, theirs = os.pipe()
            child = os.fork()
            if not child:
                signal.alarm(LIMIT_S)
                text = json.dumps(run(json.loads(line)), default=str)
                with os.fdopen(theirs, "w") as pipe, contextlib.suppress(BrokenPipeError):
                    pipe.write(text)
                os._exit(0)
            os.close(theirs)
            with os.fdopen(ours) as pipe:
                answer = pipe.read()
            os.waitpid(child, 0)
            answers.write((answer or '{"trainings": [], "ended": "time"}') + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
