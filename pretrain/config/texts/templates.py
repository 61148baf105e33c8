"""Templates of conversations: a text for each role, `{content}` its words, or a chat template.

Special tokens are recognized in the template, never in the words. The text after the words of an
assistant has a loss as they have: it tells a model when to stop.
"""

import json

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
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Templates by name; `chatml` needs its tokens under tokenizer.special_tokens."""

CONTENT = "{content}"

Template = str | dict[str, str]
"""The name of one of `TEMPLATES`, or a text by role; or a chat template of transformers:
`tokenizer`, the path of a .jinja file, or a mapping with `jinja`, its text, and what that reads:
`bos_token`, `eos_token` and others, and `date` (ISO), today's for `strftime_now`; `tool_use` is
another text, for conversations with tools. `special` are the special tokens that turns may not
spell, a line each; `prepare` fills it in."""

OF_TOKENIZER = "tokenizer"
AUTO = "auto"
JINJA_KEY = "jinja"
DATE_KEY = "date"
SPECIAL_KEY = "special"
TOOLS_KEY = "tool_use"


def is_jinja(template: Template | None) -> bool:
    """Returns whether a template is a chat template of transformers."""
    if isinstance(template, str):
        return template == OF_TOKENIZER or template.endswith(".jinja")
    return template is not None and JINJA_KEY in template


def check_template(template: Template | None) -> Template | None:
    """Returns a valid template: None, a name, or a text by role. Raises: ValueError."""
    if template is not None and is_jinja(template):
        handled = {DATE_KEY, JINJA_KEY, SPECIAL_KEY, TOOLS_KEY}
        for key in template if isinstance(template, dict) else ():
            if key not in handled and not key.endswith("_token"):
                what = f"template.{key} goes with no {JINJA_KEY}"
                raise ValueError(f"{what}; use {DATE_KEY}, or a name such as eos_token")
        return template
    if isinstance(template, str) and template not in TEMPLATES:
        use = f"use {', '.join((*TEMPLATES, OF_TOKENIZER, AUTO))} or a .jinja file"
        raise ValueError(f"template={template!r} is unknown; {use}, or give a text for each role")
    # One place for the words: the text is cut there into what comes before and after.
    for role, text in template.items() if isinstance(template, dict) else ():
        if text.count(CONTENT) != 1:
            raise ValueError(f"template.{role}={text!r} must have {CONTENT} once")
    return template


def check_named_template(template: Template | None) -> Template | None:
    """Returns a valid template of a config, where `auto` is one too. Raises: ValueError."""
    return template if template == AUTO else check_template(template)


def turns_of(template: Template) -> dict[str, tuple[str, str]]:
    """Returns the text before and after the words of a turn, by role."""
    texts = TEMPLATES[template] if isinstance(template, str) else template
    parts = {role: text.partition(CONTENT) for role, text in texts.items()}
    return {role: (before, after) for role, (before, _, after) in parts.items()}


def to_named(template: Template, begin: str = "") -> str | list[dict[str, str]]:
    """Returns `chat_template` of a tokenizer_config.json: a text; a list, if tools have another."""
    text = to_jinja(template, begin)
    if isinstance(template, str) or not is_jinja(template) or TOOLS_KEY not in template:
        return text
    named = {"default": text, TOOLS_KEY: template[TOOLS_KEY]}
    return [{"name": name, "template": one} for name, one in named.items()]


def to_jinja(template: Template, begin: str = "") -> str:
    """Returns the chat template of transformers that writes the same text, after `begin`.

    One of transformers is returned as it is.
    """
    if isinstance(template, dict) and is_jinja(template):
        return template[JINJA_KEY]
    turns = json.dumps(turns_of(template), ensure_ascii=False)
    first = f"{{{{- {json.dumps(begin, ensure_ascii=False)} -}}}}\n" if begin else ""
    return (
        f"{{%- set turns = {turns} -%}}\n{first}"
        "{%- for message in messages -%}\n"
        "{%- if message['role'] not in turns -%}\n"
        "{{- raise_exception('the template has no role ' ~ message['role']) -}}\n"
        "{%- endif -%}\n"
        "{{- turns[message['role']][0] ~ message['content'] ~ turns[message['role']][1] -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- turns['assistant'][0] -}}{%- endif -%}\n"
    )
