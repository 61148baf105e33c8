"""Record of a head: its scores, and everything that a stage may ask of it. One file each in `kinds/heads/`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord:
    """Entry of the registry."""

    # Scores.
    has_scores: bool = True  # else hidden states, or what is made of those of a document
    scores_words: bool = False  # of a vocabulary, each of whose tokens has a row
    names_labels: bool = False  # of labels, which the config names
    restores: bool = False  # of pixels, of patches that are not read
    num_scores: int = 0  # of each position; 0: as many as words, labels or pixels
    summarizes: bool = False  # a document has one output, at its first position
    scores_tokens: bool = False  # of each token, for which a pooler has no place
    averages: bool = False  # `mean`, of the hidden states of a document in its place
    pools: bool = False  # vectors of documents, which are compared with each other
    reads_samples: bool = False  # of a generator, `model.generator_heads`
    answers_questions: bool = False  # of two texts, whose scores over a document are compared

    # Keys of `model.head` and of models.
    settings: tuple[str, ...] = ("transform", "bias", "mean")
    """Keys that define its function, besides its kind."""
    stacks: tuple[str, ...] = ()  # permitted, alone; empty: any
    scales: bool = False  # `scaled`, `scale` and `soft_cap` apply
    fine_tuned: bool = False  # put on a pretrained model, which is then learned on documents; has dropout
    of_texts: bool = False  # not for a model of images
    has_norm: bool = True  # behind `transform`
    cut: bool = False  # was tried with `parallel.tensor`

    # Hugging Face.
    hub_class: str = ""  # suffix of its classes; empty: it follows from the stacks and the labels
    hub_task: str = ""  # `pipeline_tag` of a model card, of such a class

    # Targets of a run.
    chooses: bool = True  # one of several answers, which has an accuracy
    counted: str = "tokens"
    """Metric that counts targets."""
    targets: str = "target tokens"
    """Targets in words."""
    without_loss: str = ""
    """Reason why a model that is no run's is not evaluated."""
