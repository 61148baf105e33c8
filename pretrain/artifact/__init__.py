"""Any WHAT: a run, a checkpoint, a model folder, a Hugging Face folder -- opened, imported, exported."""

from pretrain.artifact.model_path import find_checkpoint
from pretrain.artifact.open import Artifact, open_artifact

__all__ = ["Artifact", "find_checkpoint", "open_artifact"]
