"""Exchange with Hugging Face: folders opened and written, tensors converted, tokenizers, other runtimes."""
