"""Speech to text, all weights: python whisper.py MODEL [TOKENS]."""

import sys

import torch
from transformers import (
    AutoModelForSpeechSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

folder = sys.argv[1]
length = int(sys.argv[2]) if len(sys.argv) > 2 else 224

model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
# Two frames of a spectrogram are one position of the encoder: 30 seconds of speech.
frames = 2 * model.config.max_source_positions


class Speech(torch.utils.data.Dataset):
    """Noise of half a minute, and words."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        labels = torch.randint(model.config.vocab_size - 1, (length,))
        return {"input_features": torch.randn(model.config.num_mel_bins, frames), "labels": labels}


trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=4,
        logging_steps=1,
        bf16=True,
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=Speech(),
)
trainer.train()
