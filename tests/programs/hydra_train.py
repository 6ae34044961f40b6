import hydra
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from model import build, fit


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    model, train, valid = build(cfg)
    fit(
        model,
        DataLoader(train, batch_size=cfg.train.batch_size, shuffle=True),
        DataLoader(valid, batch_size=cfg.eval.batch_size),
        accum=cfg.train.grad_accum,
    )


main()
