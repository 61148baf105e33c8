"""Tasks of `pretrain finetune`, by name. A new one: its two recipes, and a record here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Record of a task; its recipe says objective, model and length of rows."""

    data: str
    """Layout of the data, whose fields are the columns that tell the task."""
    prepare: str
    """Recipe of `pretrain prepare`."""
    recipe: str
    """Recipe of `pretrain train`."""
    conversations: tuple[str, ...] = ()
    """Columns that may hold the messages of a conversation, the first that is there. Empty: no conversations."""
    template: str = ""
    """Template of a model that has none of its own."""
    answers_already: bool = False
    """The model must have a template of its own, from a training on answers."""


TASKS: dict[str, Task] = {
    "instruction": Task(data="records", prepare="instructions", recipe="instruction_lora", template="instruction"),
    "chat": Task(data="records", prepare="chat", recipe="chat", conversations=("messages", "conversations")),
    "dpo": Task(data="preferences", prepare="preferences", recipe="dpo", answers_already=True),
    "translate": Task(data="pairs", prepare="pairs", recipe="translate"),
    "classify": Task(data="classes", prepare="sentences", recipe="classify"),
    "tag": Task(data="tags", prepare="sentences", recipe="tag"),
    "answers": Task(data="answers", prepare="sentences", recipe="answers"),
    "choices": Task(data="choices", prepare="sentences", recipe="choices"),
    "continued": Task(data="text", prepare="sentences", recipe="continued"),
}
"""All tasks, in the order in which messages name them."""
