import typer
from transformers import Trainer, TrainingArguments

from parts import data, model_of


def main(model: str = "gpt2", batch_size: int = 8, accum: int = 4, checkpointing: bool = False):
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accum,
        gradient_checkpointing=checkpointing,
    )
    Trainer(model_of(model), args, train_dataset=data()).train()


typer.run(main)
