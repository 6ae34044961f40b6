from transformers import Trainer, TrainingArguments

from parts import data, model

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    num_train_epochs=1,
)
Trainer(model, args, train_dataset=data).train()
