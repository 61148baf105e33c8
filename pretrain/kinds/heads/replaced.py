"""Score of each token as one that was replaced (Clark et al. 2020)."""

from pretrain.kinds.head import HeadRecord

REPLACED = HeadRecord(
    num_scores=1,
    scores_tokens=True,
    stacks=("encoder",),
    of_texts=True,
    hub_class="ForPreTraining",
    hub_task="feature-extraction",
    has_norm=False,
    reads_samples=True,
    without_loss="a detector of replaced tokens has no loss without the generator that replaces them",
)
