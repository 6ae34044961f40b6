import argparse

import deepspeed

from parts import data, model

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
engine, _, loader, _ = deepspeed.initialize(args, model=model, training_data=data)
for batch in loader:
    engine.backward(engine(batch))
    engine.step()
