"""What a recurrent model holds while it decodes: a state a row, of the same size however much was read."""

from torch import Tensor

from pretrain.model.recurrent.decoder import DecoderState
from pretrain.model.recurrent.encoder import Encoded


class RecurrentCache:
    """The state of each row, and the source.

    Attributes:
        state: None before the first token.
        encoded: None without an encoder.
        length: Positions read so far.
    """

    def __init__(self) -> None:
        self.state: DecoderState | None = None
        self.encoded: Encoded | None = None
        self.length = 0

    def select(self, rows_B: Tensor) -> None:
        """Keeps the given rows, in their order; a row may come several times."""
        if self.state is not None:
            self.state = self.state.select(rows_B)
        if self.encoded is not None:
            documents_BS = self.encoded.documents_BS
            self.encoded = self.encoded._replace(
                outputs_BSD=self.encoded.outputs_BSD[rows_B],
                documents_BS=None if documents_BS is None else documents_BS[rows_B],
            )
