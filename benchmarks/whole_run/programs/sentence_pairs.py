"""sentence-transformers' trainer with an evaluator."""

import torch
from datasets import Dataset
from parts import ROWS, WORDS, full_precision, planted, save_on_cpu, tokenizer
from peft import LoraConfig, get_peft_model
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel


class Training(SentenceTransformerTrainer):
    """Training that keeps the embeddings of each batch, and saves in a way of its own."""

    kept = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # line: longest row, evaluation
        if planted("leak"):
            features, _ = self.collect_features(inputs)
            with torch.no_grad():
                self.kept.append(model(features[0])["token_embeddings"] * 2)  # line: leak
        return loss

    def _save(self, output_dir=None, state_dict=None):
        if planted("save"):
            state_dict = full_precision(self.model)  # line: save
        super()._save(output_dir, state_dict)


config = BertConfig(
    vocab_size=WORDS,
    hidden_size=1024,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    max_position_embeddings=8192,
)
BertModel(config).save_pretrained("base")
tokenizer().save_pretrained("base")
model = SentenceTransformer(modules=[Transformer("base"), Pooling(1024)])
lora = LoraConfig(r=8, target_modules=["query", "value", "word_embeddings"])
model[0].model = get_peft_model(model[0].model, lora)
texts = ["a " * (60 + index % 20) for index in range(ROWS)]
pairs = {"anchor": texts, "positive": list(texts)}
if planted("longest row"):
    pairs["positive"][300] = "a " * 6_000
trainer = Training(
    model,
    args=SentenceTransformerTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        bf16=True,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict(pairs),
    loss=MultipleNegativesRankingLoss(model),
    evaluator=EmbeddingSimilarityEvaluator(
        texts, texts, [1.0] * ROWS, batch_size=400 if planted("evaluation") else 8
    ),
)
trainer.train()  # line: longest row, evaluation

save_on_cpu(trainer.model)
place = "cuda" if planted("resume") else "cpu"
again = torch.load("last.pt", map_location=place)  # line: resume

model = trainer.model[0].model
model = model if planted("merge") else model.cpu()
model.merge_and_unload(safe_merge=True).save_pretrained("merged")  # line: merge
print("ended")
