BATCH, LENGTH = 6, 1024
TRAIN = {"accumulation": 5, "epochs": 3}
