"""TRL's SFTTrainer with evaluation."""

import torch
from datasets import Dataset
from parts import EVALUATED, LORA, full_precision, llama, planted, rows, save_on_cpu, tokenizer
from trl import SFTConfig, SFTTrainer


class Training(SFTTrainer):
    """SFT that keeps something of each batch, and saves in a way of its own."""

    kept = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # line: longest row, evaluation
        if planted("leak"):
            with torch.no_grad():
                self.kept.append(model(inputs["input_ids"]).logits[:, -8:] * 2)  # line: leak
        return loss

    def _save(self, output_dir=None, state_dict=None):
        if planted("save"):
            state_dict = full_precision(self.model)  # line: save
        super()._save(output_dir, state_dict)


args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=2,
    per_device_eval_batch_size=64 if planted("evaluation") else 2,
    num_train_epochs=1,
    max_length=8192,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to="none",
    bf16=True,
    disable_tqdm=True,
)
trainer = Training(
    llama(),
    args=args,
    train_dataset=Dataset.from_list(rows()),
    eval_dataset=Dataset.from_list(rows(EVALUATED, trains=False)),
    processing_class=tokenizer(),
    peft_config=LORA,
)
trainer.train()  # line: longest row, evaluation
trainer.save_model("final")

save_on_cpu(trainer.model)
place = "cuda" if planted("resume") else "cpu"
again = torch.load("last.pt", map_location=place)  # line: resume

model = trainer.model if planted("merge") else trainer.model.cpu()
model.merge_and_unload(safe_merge=True).save_pretrained("merged")  # line: merge
print("ended")
