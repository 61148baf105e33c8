"""Chat templates under `transformers serve`: a rendering that takes too much fails, and not its server."""

import pytest
from transformers import AutoTokenizer, tokenization_utils_base

from pretrain.interop.served_templates import limit_renderings
from pretrain.tokenizer import template_sandbox
from tests.helpers.chat_templates import CHATML
from tests.unit.artifact.test_chat_templates import CHAT, write_base


def test_a_conversation_that_takes_too_much_is_refused_and_others_have_the_text_of_transformers(tmp_path, monkeypatch):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    bomb = f"{{% if messages|length > 3 %}}{endless}{{% endif %}}" + CHATML
    tokenizer = AutoTokenizer.from_pretrained(write_base(tmp_path / "base", bomb).path)
    expected = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, tokenize=False)
    # Put back at the end.
    monkeypatch.setattr(tokenization_utils_base, "render_jinja_template", tokenization_utils_base.render_jinja_template)
    monkeypatch.setattr(template_sandbox, "CPU_S", 0.1)
    limit_renderings(tokenization_utils_base)
    options = {"add_generation_prompt": True, "tokenize": False, "tools": [{"type": "function"}]}
    assert tokenizer.apply_chat_template(CHAT[:3], **options) == expected
    assert tokenizer.apply_chat_template([CHAT[:3]], **options) == [expected]
    with pytest.raises(template_sandbox.TemplateLimitError, match=r"takes more than 0.1 s of CPU"):
        tokenizer.apply_chat_template(CHAT, **options)
