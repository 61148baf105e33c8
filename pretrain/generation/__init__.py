"""Text from a trained model: greedy decoding, sampling, beam search, filling of masks."""
