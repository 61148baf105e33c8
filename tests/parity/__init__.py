"""Models of Hugging Face transformers with our weights, or ours with theirs, must agree."""
