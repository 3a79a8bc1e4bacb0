"""The batch's layout, prompts from files and their order, GSM8K, the generated task."""
