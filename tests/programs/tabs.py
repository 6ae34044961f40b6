from transformers import Trainer, TrainingArguments

from parts import data, model


def main():
	args = TrainingArguments(
		output_dir="out",
		per_device_train_batch_size=4,	# small
		bf16=True,
	)
	Trainer(model, args, train_dataset=data).train()


if __name__ == "__main__":
	main()
