"""The batch's layout, prompts from files, their order, GSM8K, the generated task."""
