"""Texts."""

from pretrain.kinds.layout import Layout

TEXT = Layout(
    fields=("text_field",),
    filtered=True,
    begun=True,
    running_text=True,
)
