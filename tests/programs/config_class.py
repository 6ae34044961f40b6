from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from prepare import collate, load_everything


class Config:
    """Everything to tune."""

    MODEL = "google/flan-t5-large"
    BATCH_SIZE = 8
    ACCUM_STEPS = 4
    CHECKPOINTING = True


class EvalConfig:
    BATCH_SIZE = 64


model, train, valid = load_everything(Config.MODEL)
arguments = Seq2SeqTrainingArguments(
    output_dir="out",
    per_device_train_batch_size=Config.BATCH_SIZE,
    per_device_eval_batch_size=EvalConfig.BATCH_SIZE,
    gradient_accumulation_steps=Config.ACCUM_STEPS,
    gradient_checkpointing=Config.CHECKPOINTING,
)
Seq2SeqTrainer(model, arguments, collate, train, valid).train()
