"""Config of texts: templates of conversations, rules of quality."""
