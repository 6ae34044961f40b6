from torch.utils.data import DataLoader

from parts import dataset, model, optimizer


def train(batch_size=4, grad_accum=8, epochs=1):
    loader = DataLoader(dataset("train"), batch_size=batch_size, shuffle=True)
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            (model(batch).loss / grad_accum).backward()
            if (number + 1) % grad_accum == 0:
                optimizer.step()


if __name__ == "__main__":
    train(2, 16, epochs=3)
