from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

# ---- what to change ----
MODEL = "HuggingFaceTB/SmolLM2-1.7B"
BATCH_SIZE = 4
EVAL_BATCH_SIZE = 8
ACCUM = 16
LR = 1e-4
CHECKPOINTING = False
SEQ_LEN = 4_096
# ------------------------


def main():
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    args = TrainingArguments(
        "out",
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=EVAL_BATCH_SIZE,
        gradient_accumulation_steps=ACCUM,
        gradient_checkpointing=CHECKPOINTING,
        learning_rate=LR,
    )
    Trainer(model, args).train()


if __name__ == "__main__":
    main()
