import lightning as L
import torch
from torch.utils.data import DataLoader

from mine import Net, make_set


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 32, workers: int = 4):
        super().__init__()
        self.batch_size = batch_size
        self.workers = workers

    def train_dataloader(self):
        return DataLoader(make_set("train"), batch_size=self.batch_size, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(make_set("val"), batch_size=self.batch_size * 4)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return self.net(*batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = L.Trainer(max_epochs=3, precision="bf16-mixed", accumulate_grad_batches=4)
trainer.fit(Module(), Data())
