"""Summaries with an encoder and a decoder, all weights: python seq2seq.py MODEL [LENGTH]."""

import sys

from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 512

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
texts = [f"Line {i} of a text. " * (i + length // 16) for i in range(64)]
articles = tokenizer(texts, truncation=True, max_length=length)
summaries = tokenizer(text_target=texts, truncation=True, max_length=length // 4)
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=Dataset.from_dict({**articles, "labels": summaries["input_ids"]}),
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
)
trainer.train()
