"""config.json is read key by key: what is missing has its default, what is odd is refused by key and value."""

import pytest

from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError
from pretrain.families.config_json import Fields, build_config


def test_a_missing_key_has_the_default_and_a_null_is_none():
    fields = Fields({"a": None, "b": 3})
    assert fields.optional_integer("a", 7) is None
    assert fields.optional_integer("missing", 7) == 7
    assert fields.optional_integer("missing") is None
    assert fields.integer("b", 7) == 3
    assert fields.number("b") == 3.0
    assert fields.flag("missing", True) and not fields.flag("a", True)
    fields.only("a", False, "a null is false")
    assert fields.section("a") == fields.section("missing") == {}


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda f: f.integer("missing"), "config.json: missing is missing; add it: an integer"),
        (lambda f: f.integer("text"), "config.json: text='12': must be an integer"),
        (lambda f: f.integer("flag"), "config.json: flag=True: must be an integer"),
        (lambda f: f.integer("null", 3), "config.json: null=None: must be an integer"),
        (lambda f: f.integer("num_layers"), "config.json: num_layers=1000000000: no model has more than 2000"),
        (lambda f: f.integer("digits"), f"config.json: digits=1{'0' * 199}: has more than 53 bits"),
        (lambda f: f.number("digits"), f"config.json: digits=1{'0' * 199}: must be finite"),
        (lambda f: f.number("infinite"), "config.json: infinite=inf: must be finite"),
        (lambda f: f.numbers("mixed"), "config.json: mixed=nan: must be finite"),
        (lambda f: Fields({"eos_token_id": 2**40}).special_tokens(), f"eos_token_id={2**40}: must be an integer"),
        (lambda f: f.read({"n_head": ("heads", 12)}), "config.json: n_head=0: must be 1 or more"),
        (lambda f: f.number("text", 1.0), "config.json: text='12': must be a number"),
        (lambda f: f.flag("number", False), "config.json: number=1.5: must be true or false"),
        (lambda f: f.section("text"), "config.json: text='12': must be an object"),
        (lambda f: f.activation("text", "silu"), "config.json: text='12': not an activation of ours"),
        (lambda f: f.activation("fast", "silu"), "config.json: fast='gelu_10': not an activation of ours"),
        (lambda f: f.only("number", 1.0, "because"), "number=1.5: only 1.0 can be represented: because"),
        (lambda f: f.only("absent", 1, "because", missing=2), "absent=2: only 1 can be represented: because"),
        (lambda f: f.special_tokens(), "pad_token_id='0': must be an integer or a list of them"),
    ],
)
def test_what_does_not_fit_is_refused_by_key_and_value(read, message):
    values = {"text": "12", "flag": True, "null": None, "number": 1.5, "fast": "gelu_10", "pad_token_id": "0"}
    values |= {"num_layers": 10**9, "n_head": 0, "digits": 10**400, "infinite": 1e400, "mixed": [1, float("nan")]}
    with pytest.raises(ConfigError) as error:
        read(Fields(values))
    assert message in str(error.value)


@pytest.mark.parametrize("values", [{"a": False}, {}])
def test_a_value_that_ours_has_built_in_passes(values):
    fields = Fields(dict(values))
    fields.only("a", False, "because")
    assert fields.values == values
    with pytest.raises(ConfigError, match=r"a=.*: only True can be represented: because"):
        fields.only("a", True, "because", missing=False)


def test_a_table_is_read_under_our_names_and_types():
    keys = {"n_layer": ("layers", 12), "eps": ("norm_eps", 1e-5), "tied": ("tied_embeddings", True)}
    fields = Fields({"n_layer": 2, "eps": 1})
    assert fields.read(keys) == {"layers": 2, "norm_eps": 1.0, "tied_embeddings": True}
    assert Fields({}).read(keys, {"n_layer": 3})["layers"] == 3
    with pytest.raises(ConfigError, match="tied=1: must be true or false"):
        Fields({"tied": 1}).read(keys)


def test_special_tokens_take_defaults_lists_and_minus_one():
    tokens = Fields({"pad_token_id": -1, "eos_token_id": [5, 6]}).special_tokens(bos=1, eos=2, pad=3)
    assert (tokens.pad, tokens.bos, tokens.eos, tokens.start) == (None, 1, 5, None)
    assert Fields({"eos_token_id": []}).special_tokens(eos=2).eos is None
    assert Fields({"decoder_start_token_id": 0}).special_tokens(start=None).start == 0
    assert Fields({"decoder_start_token_id": -1}).special_tokens(start=7).start is None
    assert Fields({}).special_tokens(start=7, mask=8) == SpecialTokens(start=7, mask=8)


def test_values_that_make_no_model_are_one_line():
    with pytest.raises(ConfigError, match=r"config.json: no model of ours has these values: decoder: .*width=10 must"):
        build_config(decoder={"layers": 1, "width": 10, "heads": 3, "ff_width": 4})
