"""From text to batches: tokenizer, prepare, shards, order (pure), pack, stream, loader."""
