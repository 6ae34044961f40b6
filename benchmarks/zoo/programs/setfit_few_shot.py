"""SetFit with few examples, as its README has it: python setfit_few_shot.py MODEL."""

import sys

from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments

rows = Dataset.from_dict(
    {
        "text": [f"A film that I saw {i} times. " * 8 for i in range(16)],
        "label": [i % 2 for i in range(16)],
    }
)
model = SetFitModel.from_pretrained(sys.argv[1], labels=["negative", "positive"])
trainer = Trainer(
    model=model,
    args=TrainingArguments(batch_size=16, num_epochs=1, report_to="none"),
    train_dataset=rows,
    eval_dataset=rows,
    metric="accuracy",
)
trainer.train()
