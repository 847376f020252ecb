"""What lies in a Hugging Face folder beside the weights."""
