"""Texts."""

from pretrain.kinds.layout import Layout

TEXT = Layout(
    fields=("text_field",),
    library_format="text",
    filtered=True,
    begun=True,
    running_text=True,
)
