import transformers

from parts import data, model_of


def main():
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses()
    transformers.Trainer(model_of("gpt2"), args, train_dataset=data()).train()


main()
