"""How the turns of a conversation are written as text: by role, with `{content}` where the words of a turn go.

What stands around the words may name special tokens of the tokenizer, and becomes them; the words never do. Of a turn
that is learned, what follows its words is learned with them: that is how a model knows when to stop.
"""

TEMPLATES: dict[str, dict[str, str]] = {
    "instruction": {
        "system": "{content}\n\n",
        "user": "### Instruction:\n{content}\n\n",
        "assistant": "### Response:\n{content}\n\n",
    },
    "chatml": {
        role: f"<|im_start|>{role}\n{{content}}<|im_end|>\n" for role in ("system", "user", "assistant", "tool")
    },
}
"""By the name that `inputs.N.template` takes. `chatml` wants tokenizer.special_tokens: [<|im_start|>, <|im_end|>]."""

CONTENT = "{content}"


def check_template(template: str | dict[str, str] | None) -> str | dict[str, str] | None:
    """Returns a template that is none, one of `TEMPLATES`, or one of its own. Raises: ValueError."""
    if isinstance(template, str) and template not in TEMPLATES:
        raise ValueError(
            f"template={template!r} is unknown; use {' or '.join(TEMPLATES)}, or give a text for each role"
        )
    for role, text in template.items() if isinstance(template, dict) else ():
        if text.count(CONTENT) != 1:
            raise ValueError(f"template.{role}={text!r} must have {CONTENT} once")
    return template


def turns_of(template: str | dict[str, str]) -> dict[str, tuple[str, str]]:
    """Returns by role what stands before and after the words."""
    texts = TEMPLATES[template] if isinstance(template, str) else template
    return {role: (text.partition(CONTENT)[0], text.partition(CONTENT)[2]) for role, text in texts.items()}
