"""Training: demonstrations, tokenizer, optimizer, supervised fine-tuning."""
