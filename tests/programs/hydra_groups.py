import hydra
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from parts import optimizer, rows


@hydra.main(version_base=None, config_path="hydra_conf", config_name="main")
def main(cfg: DictConfig) -> None:
    loader = DataLoader(rows, batch_size=cfg.data.batch_size, shuffle=True)
    for number, batch in enumerate(loader):
        batch.loss.backward()
        if (number + 1) % cfg.trainer.accumulate_grad_batches == 0:
            optimizer.step()


if __name__ == "__main__":
    main()
