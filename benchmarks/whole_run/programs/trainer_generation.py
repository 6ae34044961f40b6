"""transformers' Seq2SeqTrainer, whose evaluation generates."""

import torch
from datasets import Dataset
from parts import EVALUATED, WORDS, full_precision, planted, rows, save_on_cpu, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


class Training(Seq2SeqTrainer):
    """Training that keeps the logits of each batch, and saves in a way of its own."""

    kept = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(  # line: longest row
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if planted("leak"):
            self.kept.append(outputs.logits[:, -8:].float())  # line: leak
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir=None, state_dict=None):
        if planted("save"):
            state_dict = full_precision(self.model)  # line: save
        super()._save(output_dir, state_dict)


config = T5Config(
    vocab_size=WORDS,
    d_model=1024,
    d_kv=128,
    d_ff=1024,
    num_layers=2,
    num_heads=8,
    decoder_start_token_id=0,
    tie_word_embeddings=False,
)
model = T5ForConditionalGeneration(config).to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q", "v", "lm_head"]))
words = tokenizer()
trainer = Training(
    model,
    args=Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=32 if planted("evaluation") else 2,
        predict_with_generate=True,
        generation_max_length=20,
        generation_num_beams=4,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows()),
    eval_dataset=Dataset.from_list(rows(EVALUATED, trains=False)),
    data_collator=DataCollatorForSeq2Seq(words, padding=True),
    processing_class=words,
    compute_metrics=lambda predicted: {"tokens": float(predicted.predictions.size)},
)
trainer.train()  # line: longest row, evaluation

save_on_cpu(trainer.model)
place = "cuda" if planted("resume") else "cpu"
again = torch.load("last.pt", map_location=place)  # line: resume

model = trainer.model if planted("merge") else trainer.model.cpu()
model.merge_and_unload(safe_merge=True).save_pretrained("merged")  # line: merge
print("ended")
