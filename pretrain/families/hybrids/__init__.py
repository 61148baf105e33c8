"""Families of hybrids: layers of attention, and of mixers with a state; and those that no mixer here computes."""

LACKING = {
    "kimi_linear": "its gated delta rule (KDA) decays each dimension of a key apart",
    "nemotron_h": "its layers are a mixer or a feed-forward layer each, in any order",
    "falcon_h1": "its layers add attention and Mamba-2 side by side, each by factors of its own",
    "zamba2": "its layers of attention share weights, and read the embeddings besides",
}
"""Reasons by `model_type` of transformers for which no keys of a stack represent a hybrid."""
