"""Parts of a Transformer, each with its module; `pretrain/config/model/parts/` counts them."""
