"""Record of an optimizer: everything that a stage may ask of it. One file each in `kinds/optimizers/`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""State tensors of Adam and of what extends it, in the shape of the parameter."""

LONGEST_SQUARED = 10_000
"""Longest side of a matrix that has squares of its own (SOAP, section 4)."""


@dataclass(frozen=True, slots=True)
class MatrixState:
    """State of a matrix [R, C] that is stepped whole: numbers of fp32 tensors, by their shape."""

    values: int = 0  # [R, C]
    rows: int = 0  # [R]
    columns: int = 0  # [C]
    squares: int = 0  # [R, R], and as many [C, C], of sides up to LONGEST_SQUARED

    def sizes(self, shape: tuple[int, ...]) -> list[int]:
        """Returns the elements of each tensor of a matrix; a vector has one, of its own length."""
        if len(shape) == 1:
            return [shape[0]]
        rows, columns = shape
        squares = [side * side for side in shape if side <= LONGEST_SQUARED]
        return [rows * columns] * self.values + [rows] * self.rows + [columns] * self.columns + squares * self.squares


def slower_by_width(own: Any, width: float) -> float:
    """Returns the factor of a hidden matrix's rate whose update has a size of its own: 1 / width (Yang et al. 2022)."""
    return 1 / width


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer that `optim.kind` chooses.

    Attributes:
        build: `"module:function"` of (groups, config, device) -> torch.optim.Optimizer.
        fused: The builder, as `build`, of a `FusedStep` (`pretrain/optim/fused.py`), which steps
            flat masters of 16-bit weights by one compiled kernel. None: there is none.
        section: Keys that it alone reads, under `optim.KIND`; `lr`, `weight_decay` and `split_heads`
            among them are of hidden matrices. None: it has none.
        moments: State tensors of what it steps elementwise. Empty: it steps everything whole.
        matrices: State of a matrix that it steps whole, by its own keys. None: it is elementwise.
        usual_rate: A peak rate (`optim.lr`) to begin with.
        is_cautious: It knows `cautious_decay`.
        transfer: Factor of a hidden matrix's rate under `optim.transfer`, by its own keys and the
            width over that of the base model. None: it has no rule.
        is_in_bf16: It multiplies in bf16 at every precision.
    """

    build: str
    fused: str | None = None
    section: type[Section] | None = None
    moments: tuple[str, ...] = ADAM_MOMENTS
    matrices: Callable[[Any], MatrixState] | None = None
    usual_rate: float | None = None
    is_cautious: bool = False
    transfer: Callable[[Any, float], float] | None = None
    is_in_bf16: bool = False


class TransferConfig(Section):
    """Transfer of rates, tuned on a small base model, to a wider or deeper one of its proportions.

    Widths of feed-forward layers and tables (`embedding_width`), and the number or width of heads,
    grow with the width. At the base's size nothing changes.
    """

    kind: Annotated[Literal["mup", "completep"], OnResume.ALLOW]
    """`mup`: by width (Yang et al. 2022). `completep`: by width and depth (Dey et al. 2025, alpha = 1)."""
    base_width: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Width D of the base model."""
    base_layers: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1)
    """Blocks of the base model, for `completep`."""
    base_head_width: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1)
    """Head width H of the base model: scores scale as 1/H from there. None: that of this model,
    which has more heads."""

    def _conflicts(self) -> Conflicts:
        if self.kind == "completep" and self.base_layers is None:
            yield "kind=completep needs base_layers, the blocks of the base model"
        if self.kind == "mup" and self.base_layers is not None:
            yield "base_layers is for kind=completep, mup has no rule for depth", "leave it out"
