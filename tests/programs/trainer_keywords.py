"""Fine-tune a small model on recipes with the Trainer of transformers."""

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", attn_implementation="sdpa")


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=1024)


data = load_dataset("json", data_files="recipes.jsonl")["train"].train_test_split(test_size=0.1)
data = data.map(tokenize, batched=True, batch_size=500)

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,  # 8 was too much
    per_device_eval_batch_size=16,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    optim="adamw_torch_fused",
    learning_rate=2e-4,
    bf16=True,
)
trainer = Trainer(
    model,
    args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
