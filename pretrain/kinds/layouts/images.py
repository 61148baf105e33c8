"""Images in folders of classes, without tokens and tokenizer."""

from pretrain.kinds.layout import IMAGE_COLUMNS, Layout

IMAGES = Layout(
    images=True,
    names_labels=True,
    table_columns=IMAGE_COLUMNS,
    length_columns=3,  # 1, the one token that each counts as, then width and height in pixels
)
