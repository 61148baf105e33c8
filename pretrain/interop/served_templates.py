"""Chat templates under the server of transformers, with the limits of ours.

A rendering is tried in the sandbox first: one that takes too much CPU or memory fails its request,
and not the server. The text is that of transformers.
"""

from collections.abc import Sequence
from typing import Any

from pretrain.tokenizer.template_sandbox import sandbox


def limit_renderings(module: Any) -> None:
    """Makes `render_jinja_template` of a module try each conversation in the sandbox."""
    render = module.render_jinja_template

    def limited(conversations: Sequence[Any], **options: Any) -> Any:
        for one in conversations:
            messages = list(getattr(one, "messages", one))
            jobs = [(len(messages), bool(options.get("add_generation_prompt")))]
            variables = {**options, "messages": messages}
            # What the template refuses, transformers refuses too.
            sandbox().render(options["chat_template"], None, variables, jobs)
        return render(conversations=conversations, **options)

    module.render_jinja_template = limited
