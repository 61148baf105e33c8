"""The config of a `prepare` as its folder keeps it, without what is left to the hub or a tokenizer.

addresses of the hub     the commit of the first start
template: auto           the tokenizer's own, or ChatML
given tokenizer          its content, and how documents begin and end
chat templates           their text, special tokens and date
"""

import datetime
import logging
from pathlib import Path

from pretrain.config.prepare import PrepareConfig, TokenizerConfig
from pretrain.config.texts.templates import (
    AUTO,
    CHATML_TOKENS,
    DATE_KEY,
    JINJA_KEY,
    OF_TOKENIZER,
    TOOLS_KEY,
    is_jinja,
)
from pretrain.errors import ConfigError, DataError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.inputs.hub_datasets import pin_inputs
from pretrain.preparation.output import begun_option
from pretrain.tokenizer.chat_template import load_chat_template
from pretrain.tokenizer.file import (
    GivenTokenizer,
    check_template_of,
    own_template,
    parse_tokenizer,
    read_given,
    resolve_template,
)
from pretrain.tokenizer.roles import eos_id, special_tokens_of, start_id
from pretrain.tokenizer.train import check_tokenizer

_log = logging.getLogger(__name__)


def settle_revisions(config: PrepareConfig) -> tuple[PrepareConfig, dict[str, str]]:
    """Returns a config whose addresses of the hub name commits, and these as options.

    A branch is the commit that it was at the first start of the folder, so that a later one reads
    the same bytes. Raises: DataError.
    """

    def begun(name: str) -> str | None:
        return begun_option(Path(config.output), f"revisions.{name}")

    inputs, revisions = pin_inputs(config.inputs, begun)
    rules = config.filter
    if rules.decontaminate is not None:
        tests, more = pin_inputs(rules.decontaminate.inputs, begun)
        revisions |= more
        update = {"decontaminate": rules.decontaminate.model_copy(update={"inputs": tests})}
        rules = rules.model_copy(update=update)
    options = {f"revisions.{name}": commit for name, commit in revisions.items()}
    return config.model_copy(update={"inputs": inputs, "filter": rules}), options


def settle_auto(config: PrepareConfig) -> PrepareConfig:
    """Returns a config with the template of the tokenizer for `auto`, or ChatML and its tokens.

    Raises: The errors of `own_template`.
    """
    tokenizer = config.tokenizer
    if tokenizer.path is None or not any(one.template == AUTO for one in config.inputs):
        return config
    # A file has none itself: that of its folder or run is meant.
    place = tokenizer.path.removesuffix("/tokenizer.json")
    template = own_template(place)
    if template is not None:
        tokenizer = tokenizer.model_copy(update={"path": place})
    text = "conversations are written by the chat template of %s"
    if template is None:
        template, names = "chatml", [*tokenizer.special_tokens, *CHATML_TOKENS]
        tokenizer = tokenizer.model_copy(update={"special_tokens": list(dict.fromkeys(names))})
        text = "conversations are written in ChatML: %s has no chat template of its own"
    _log.info(text, tokenizer.path)
    inputs = [
        one.model_copy(update={"template": template if one.template == AUTO else one.template}) for one in config.inputs
    ]
    return config.model_copy(update={"inputs": inputs, "tokenizer": tokenizer})


def settle_tokenizer(config: PrepareConfig) -> tuple[PrepareConfig, GivenTokenizer | None]:
    """Returns a config whose tokenizer is checked, and a given one.

    Raises: The errors of `read_given`.
    """
    check_tokenizer(config.tokenizer)
    if config.tokenizer.kind != "given":
        return config, None
    tokenizer = read_given(config.tokenizer)
    return config.model_copy(update={"tokenizer": _resolve(config, tokenizer)}), tokenizer


def settle_templates(config: PrepareConfig, given: GivenTokenizer | None) -> PrepareConfig:
    """Returns a config whose chat templates have their texts, special tokens and date.

    The date, which a template may write, is that of the first start of the folder, so that a later
    one continues it. Raises: The errors of `resolve_template`; ConfigError: It is no Jinja.
    """
    inputs = []
    for number, one in enumerate(config.inputs):
        template = one.template
        if template is not None and is_jinja(template) and given is not None:
            template = resolve_template(template, given, str(config.tokenizer.path))
        if isinstance(template, dict) and is_jinja(template):
            text = template[JINJA_KEY] + template.get(TOOLS_KEY, "")
            if "strftime_now" in text and DATE_KEY not in template:
                begun = begun_option(Path(config.output), f"inputs.{number}.template.{DATE_KEY}")
                template = {**template, DATE_KEY: begun or datetime.date.today().isoformat()}
            name = f"={one.template}" if isinstance(one.template, str) else ""
            _check_chat_template(template, f"inputs.{number}.template{name}")
            if one.template == OF_TOKENIZER:
                assert given is not None, "its template is there"
                check_template_of(given, template, config.tokenizer)
        inputs.append(one.model_copy(update={"template": template}))
    return config.model_copy(update={"inputs": inputs})


def _check_chat_template(template: dict[str, str], where: str) -> None:
    """Compiles a chat template. Raises: ConfigError: No Jinja. DataError: It takes too much."""
    try:
        load_chat_template(template)
    except (ConfigError, DataError) as error:
        raise type(error)(error.what, where=where, fix=error.fix) from None


def _resolve(config: PrepareConfig, given: GivenTokenizer) -> TokenizerConfig:
    """Fills in how documents of a given tokenizer begin and end; None: with nothing, a usual token."""
    tokenizer, name = parse_tokenizer(given.content, str(config.tokenizer.path)), given.eos
    is_usual = eos_id(tokenizer, name) == special_tokens_of(tokenizer).eos
    begins = LAYOUTS[config.kind].begun and start_id(tokenizer) is not None
    ends = None if is_usual else name
    return config.tokenizer.model_copy(update={"eos": ends, "begin": begins or None})
