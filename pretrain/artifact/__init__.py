"""Models on disk (run, checkpoint, model folder, Hugging Face folder): open, import, export, average."""

from pretrain.artifact.model_path import find_checkpoint
from pretrain.artifact.open import Artifact, open_artifact

__all__ = ["Artifact", "find_checkpoint", "open_artifact"]
