"""How one input is read: what every reader is told beside the bytes."""

from dataclasses import dataclass

from pretrain.config.prepare import DataKind, InputConfig


@dataclass(frozen=True, slots=True)
class ReadRule:
    """How one input is read.

    Attributes:
        config: The input.
        kind: What a document is.
        fields: Fields of records that filters ask for.
        skip_undecodable: Pass over a file that is not UTF-8 instead of failing; for the default corpus only.
    """

    config: InputConfig
    kind: DataKind = "text"
    fields: tuple[str, ...] = ()
    skip_undecodable: bool = False

    @property
    def limit(self) -> int:
        """Bytes that a document, and a line, may have."""
        return self.config.max_document_bytes

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Fields of a record that its document is made of."""
        config = self.config
        if self.kind == "text":
            return (config.text_field,)
        if self.kind == "pairs":
            return (config.source_field, config.target_field)
        if self.kind == "classes":
            return (config.text_field, config.label_field)
        if self.kind == "tags":
            return (config.words_field, config.tags_field)
        return (config.messages_field,) if config.messages_field else (config.prompt_field, config.response_field)
