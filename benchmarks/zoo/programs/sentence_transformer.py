"""sentence-transformers, as its documentation has it: python sentence_transformer.py MODEL."""

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

model = SentenceTransformer(sys.argv[1])
model.max_seq_length = 256
pairs = Dataset.from_dict(
    {
        "anchor": [f"What comes after {i}? " * 16 for i in range(256)],
        "positive": [f"After {i} comes {i + 1}. " * 16 for i in range(256)],
    }
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=64,
        fp16=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=pairs,
    loss=MultipleNegativesRankingLoss(model),
)
trainer.train()
