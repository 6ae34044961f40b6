from torch.utils.data import DataLoader

from parts import dataset, fit


def train(batch_size=4, grad_accum=8, epochs=1):
    loader = DataLoader(dataset("train"), batch_size=batch_size, shuffle=True)
    fit(loader, accum=grad_accum, epochs=epochs)


if __name__ == "__main__":
    train(2, 16, epochs=3)
