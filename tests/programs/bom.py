# -*- coding: utf-8 -*-
"""Détecte l'humeur d'une phrase."""
from transformers import Trainer, TrainingArguments

from outils import données, modèle

taille_lot = 16; cumul = 2

réglages = TrainingArguments("sortie", per_device_train_batch_size=taille_lot, gradient_accumulation_steps=cumul, gradient_checkpointing=False)
Trainer(modèle, réglages, train_dataset=données).train()
