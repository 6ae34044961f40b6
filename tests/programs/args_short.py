import argparse

from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

ap = argparse.ArgumentParser()
ap.add_argument("-b", "--bs", dest="micro", type=int, default=16)
ap.add_argument("-g", "--accum", type=int, default=2)
ap.add_argument("--ckpt", action=argparse.BooleanOptionalAction, default=False)
ap.add_argument("model", nargs="?", default="roberta-base")
opt = ap.parse_args()

Trainer(
    AutoModelForSequenceClassification.from_pretrained(opt.model),
    TrainingArguments(
        "out",
        per_device_train_batch_size=opt.micro,
        gradient_accumulation_steps=opt.accum,
        gradient_checkpointing=opt.ckpt,
    ),
).train()
