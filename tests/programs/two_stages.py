from transformers import Trainer, TrainingArguments

from parts import corpus, instructions, model

common = dict(bf16=True, gradient_checkpointing=True, save_strategy="no")
pretrain = TrainingArguments("a", per_device_train_batch_size=16, gradient_accumulation_steps=2, **common)
Trainer(model, pretrain, train_dataset=corpus).train()

finetune = TrainingArguments("b", per_device_train_batch_size=4, gradient_accumulation_steps=8, **common)
Trainer(model, finetune, train_dataset=instructions).train()
