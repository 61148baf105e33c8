"""What a run is doing, whether it should stop, and whether it still moves."""

from pretrain.control.progress import Progress
from pretrain.control.stop import STOP_SIGNALS, StopFlag

__all__ = ["STOP_SIGNALS", "Progress", "StopFlag"]
