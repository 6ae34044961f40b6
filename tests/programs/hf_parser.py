from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ModelArgs:
    model: str = field(default="facebook/opt-350m")
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa or eager"})


@dataclass
class TrainArgs(TrainingArguments):
    per_device_train_batch_size: int = field(default=4, metadata={"help": "micro-batch"})
    gradient_accumulation_steps: int = field(default=8)
    gradient_checkpointing: bool = field(default=False)
    optim: str = field(default="adamw_torch")


def main():
    model_args, training_args = HfArgumentParser((ModelArgs, TrainArgs)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model, attn_implementation=model_args.attn_implementation
    )
    Trainer(model, training_args, train_dataset=...).train()


main()
