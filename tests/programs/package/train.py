from transformers import Trainer, TrainingArguments

from . import settings
from .settings import Hyper
from .sub.loop import fit

hyper = Hyper()


def main():
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=settings.MICRO,
        gradient_accumulation_steps=hyper.accumulation,
        gradient_checkpointing=hyper.checkpoint,
    )
    Trainer("gpt2", arguments).train()


if __name__ == "__main__":
    main()
