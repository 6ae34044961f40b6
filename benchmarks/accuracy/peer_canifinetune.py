"""Runs in the environment of canifinetune: cases as JSON on stdin, GiB or null on stdout."""

import json
import sys

from canifinetune.estimator.memory import EstimateRequest, estimate


def _reserved_gib(case):
    settings, model = case["settings"], case["model"]
    quantised = settings["precision"] == "nf4"
    method = "qlora" if quantised else "lora" if settings["lora_rank"] else "full"
    double = settings.get("double_quant", True)
    request = EstimateRequest(
        model_id=model["name"],
        method=method,
        seq_len=settings["max_length"],
        micro_batch_size=settings["micro_batch"],
        base_dtype=case["compute"],
        quantization="nf4_double_quant" if double else "nf4",
        lora_rank=settings["lora_rank"] or 16,
        target_modules=list(settings["lora_targets"]) or None,
        optimizer=settings["optimizer"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        attention_implementation=case["attention"],
        gpu_vram_gb=case["gpu_gib"],
        use_network=False,
        override={
            "family": model["family"],
            "hidden_size": model["hidden_size"],
            "num_hidden_layers": model["layers"],
            "num_attention_heads": model["heads"],
            "num_key_value_heads": model["kv_heads"],
            "intermediate_size": model["intermediate_size"],
            "vocab_size": model["vocab_size"],
            "tie_word_embeddings": model["tied"],
            "total_params": model["params"],
        },
    )
    memory = estimate(request).memory
    return memory.total_estimated_gb - memory.safety_margin_gb


def main():
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(_reserved_gib(case))
        except (ValueError, KeyError) as error:
            print(f"row {case['row']}: {error}", file=sys.stderr)
            answers.append(None)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
