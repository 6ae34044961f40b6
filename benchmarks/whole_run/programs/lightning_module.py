"""A LightningModule with validation, checkpoints and a test of the best one."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from parts import EVALUATED, LORA, full_precision, llama, planted, rows, save_on_cpu, tokenizer
from peft import get_peft_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq


class Tuned(lightning.LightningModule):
    """A language model with adapters."""

    def __init__(self):
        super().__init__()
        self.model = get_peft_model(llama(), LORA)
        self.outputs = []

    def training_step(self, batch, index):
        outputs = self.model(**batch)  # line: longest row
        if planted("leak"):
            self.outputs.append(outputs.logits.detach()[:, -8:] * 2)  # line: leak
        return outputs.loss

    def validation_step(self, batch, index):
        loss = self.model(**batch).loss  # line: evaluation
        self.log("loss", loss, batch_size=len(batch["input_ids"]))

    def on_save_checkpoint(self, checkpoint):
        if planted("save"):
            checkpoint["average"] = full_precision(self)  # line: save

    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad])


collate = DataCollatorForSeq2Seq(tokenizer(), padding=True)
train = DataLoader(rows(), batch_size=2, shuffle=True, collate_fn=collate)
test = DataLoader(
    rows(EVALUATED, trains=False), batch_size=64 if planted("evaluation") else 2, collate_fn=collate
)
best = ModelCheckpoint(monitor="loss")
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="gpu",
    devices=1,
    precision="bf16-mixed",
    callbacks=[best],
    logger=False,
    enable_progress_bar=False,
)
module = Tuned()
trainer.fit(module, train, test)  # line: longest row

save_on_cpu(module.model)
module.cuda()
place = None if planted("resume") else "cpu"
again = Tuned.load_from_checkpoint(best.best_model_path, map_location=place)  # line: resume

model = module.model if planted("merge") else module.model.cpu()
model.merge_and_unload(safe_merge=True).save_pretrained("merged")  # line: merge
print("ended")
