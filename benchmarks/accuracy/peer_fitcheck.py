"""Runs in the environment of fitcheck-llm: cases as JSON on stdin, GiB or null on stdout."""

import json
import sys

from fitcheck.config_parser import ModelConfig
from fitcheck.estimator import TrainingConfig, estimate
from fitcheck.gpu_db import GPU_DB


def _peak_gib(case):
    settings, model = case["settings"], case["model"]
    config = ModelConfig(
        name=model["name"],
        num_params=model["params"],
        hidden_size=model["hidden_size"],
        num_layers=model["layers"],
        num_attention_heads=model["heads"],
        num_kv_heads=model["kv_heads"],
        intermediate_size=model["intermediate_size"],
        vocab_size=model["vocab_size"],
        head_dim=model["head_dim"],
        tie_word_embeddings=model["tied"],
    )
    quantised = settings["precision"] == "nf4"
    training = TrainingConfig(
        precision=case["compute"],
        quantization="nf4" if quantised else "none",
        double_quant=quantised and settings.get("double_quant", True),
        optimizer="adam8bit" if "8bit" in settings["optimizer"] else "adamw",
        batch_size=settings["micro_batch"],
        seq_len=settings["max_length"],
        lora_rank=settings["lora_rank"] or None,
        lora_targets=list(settings["lora_targets"]),
        grad_checkpoint=settings["gradient_checkpointing"],
        flash_attn=settings["attention"] != "eager",
    )
    report = estimate(config, training, GPU_DB[case["fitcheck_gpu"]])
    return (report.total_mib - report.overhead_mib) / 1024


def main():
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(_peak_gib(case))
        except (ValueError, KeyError) as error:
            print(f"row {case['row']}: {error}", file=sys.stderr)
            answers.append(None)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
