"""Images, each with a text."""

from pretrain.kinds.layout import IMAGE_COLUMNS, Layout

CAPTIONS = Layout(
    images=True,
    captions=True,
    table_columns=IMAGE_COLUMNS,
    length_columns=3,  # as of images
)
