import hydra
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from model import build, optimizer


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    model, train, valid = build(cfg)
    loader = DataLoader(train, batch_size=cfg.train.batch_size, shuffle=True)
    for step, batch in enumerate(loader):
        model(batch).loss.backward()
        if (step + 1) % cfg.train.grad_accum == 0:
            optimizer.step()
    for batch in DataLoader(valid, batch_size=cfg.eval.batch_size):
        model(batch)


main()
