"""Tokenizers and chat templates of checkpoint folders."""

import json

import pytest
import tokenizers
from golden_models import copy_of
from tokenizers import decoders, models, pre_tokenizers, processors

from codec_jax.models import Tokenizer, load_hf, load_model
from codec_jax.models.chat import ChatTemplate, ChatTokenizer
from codec_jax.models.hf_tokenizer import HFTokenizer, load_chat_template, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<u>{{ m['content'] | trim }}</u>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def byte_level(*, adds_bos: bool) -> tokenizers.Tokenizer:
    """Three merges over bytes; special tokens <s>, </s> and </u>."""
    vocab = {
        piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    for piece in ("ab", "abc", "Ġa"):
        vocab[piece] = len(vocab)
    model = models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c"), ("Ġ", "a")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<u>", "</u>"])
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer, whose files a test may change."""
    byte_level(adds_bos=True).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>"})
    return tmp_path


def write(folder, file, **fields):
    (folder / file).write_text(json.dumps(fields))


def id_of(token):
    return byte_level(adds_bos=False).token_to_id(token)


def test_encode_and_decode(folder):
    tokenizer = load_tokenizer(folder, {})
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("abc ab") == [id_of("<s>"), *map(id_of, ("abc", "Ġ", "ab"))]
    assert tokenizer.encode("abc", bos=False) == [id_of("abc")]
    assert tokenizer.decode(tokenizer.encode("abc né\n")) == "abc né\n"
    assert tokenizer.encode("", bos=True) == [id_of("<s>")]
    assert tokenizer.vocab_size == 256 + 3 + 4
    assert tokenizer.bos_id == id_of("<s>")


def test_special_tokens_are_tokens_and_have_no_text(folder):
    tokenizer = load_tokenizer(folder, {})
    ids = tokenizer.encode("a</u>b", bos=False)
    assert ids == [id_of("a"), id_of("</u>"), id_of("b")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode([100_000]) == "", "rows of the model that pad its vocabulary"


def test_truncation_and_padding_of_the_file_are_off(folder):
    tokenizer = byte_level(adds_bos=False)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder, {}).encode("cccc") == [id_of("c")] * 4


@pytest.mark.parametrize(
    ("adds_bos", "setting", "starts"),
    [
        (True, None, True),
        (True, True, True),
        (True, False, False),
        (False, None, False),
        (False, True, True),
        (False, False, False),
    ],
)
def test_a_text_starts_with_bos_where_the_files_say_so(folder, adds_bos, setting, starts):
    byte_level(adds_bos=adds_bos).save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", bos_token="<s>", add_bos_token=setting)
    tokenizer = load_tokenizer(folder, {})
    start = [id_of("<s>")] if starts else []
    assert tokenizer.encode("abc") == [*start, id_of("abc")]
    assert tokenizer.encode("") == start


def test_any_file_may_name_what_ends_a_text(folder):
    write(folder, "generation_config.json", eos_token_id=[7, 9])
    assert load_tokenizer(folder, {"eos_token_id": 9}).stop_ids == (7, 9, id_of("</s>"))
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder, {"eos_token_id": None})
    assert (tokenizer.stop_ids, tokenizer.bos_id) == ((), None)


def test_refusals(folder):
    tokenizer = load_tokenizer(folder, {})
    with pytest.raises(ValueError, match=r"^`ids` must be at least 0; got -1\.$"):
        tokenizer.decode([3, -1])
    with pytest.raises(ValueError, match=r"^`text` must be valid Unicode; got a lone surrogate"):
        tokenizer.encode("a\ud800")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:1000])
    with pytest.raises(ValueError, match=r"must be a tokenizer; got: .* Copy it again\.") as error:
        load_tokenizer(folder, {})
    assert str(error.value).startswith(f"`{path}` ")
    path.unlink()
    with pytest.raises(ValueError, match="`") as error:
        load_tokenizer(folder, {})
    assert str(error.value) == (
        f"`{path}` must exist: prompts are tokenized by it; got no file. Other formats"
        " (tokenizer.model) are not read."
    )


def test_a_chat_template_may_be_in_three_files(folder):
    assert load_chat_template(folder) is None
    settings = {"bos_token": "<s>"}
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "1" + TEMPLATE},
    ]
    for expected, write_template in (
        ("1", lambda: write(folder, "tokenizer_config.json", chat_template=named, **settings)),
        ("2", lambda: write(folder, "chat_template.json", chat_template="2" + TEMPLATE)),
        ("3", lambda: (folder / "chat_template.jinja").write_text("3" + TEMPLATE)),
    ):
        write_template()
        template = load_chat_template(folder)
        assert template is not None
        assert template.render(" hi ") == f"{expected}<s><u>hi</u><s>"
    write(folder, "chat_template.json", chat_template=7)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"^`chat_template` in .* must be a text; got int\.$"):
        load_chat_template(folder)


def test_a_template_has_what_templates_use():
    source = """{%- set date = strftime_now('%Y') if strftime_now is defined else 'no date' -%}
    {%- for m in messages %}
        {%- if m.role != 'user' %}{% continue %}{% endif %}
        {{- {'a': '<é>'} | tojson }}{{ '<|x|>' + m.content }}
    {%- endfor %}
    {%- if tools %}never{% endif %}{{ ' ' ~ date }}"""
    assert ChatTemplate(source, {}, "t").render("hi") == '{"a": "<é>"}<|x|>hi no date'


@pytest.mark.parametrize(
    "item", [1, "x", {}, {"name": ["x"], "template": "x"}, {"name": "default"}]
)
def test_a_list_of_templates_holds_names_and_texts(folder, item):
    path = folder / "chat_template.json"
    write(folder, path.name, chat_template=[{"name": "tool_use", "template": "x"}, item])
    with pytest.raises(ValueError, match="`") as error:
        load_chat_template(folder)
    assert str(error.value) == (
        f"`chat_template` in {path} must be a text, or objects with the texts `name` and"
        f" `template`; got {item!r}."
    )
    write(folder, path.name, chat_template=[{"name": "tool_use", "template": "x"}])
    assert load_chat_template(folder) is None


def test_a_bad_template_is_refused_by_its_file(folder):
    path = folder / "tokenizer_config.json"
    write(folder, path.name, chat_template="{{ 'x'.index('y') }}")
    template = load_chat_template(folder)
    assert template is not None
    with pytest.raises(ValueError, match="`") as error:
        template.render("hi")
    assert str(error.value) == (
        f"`chat_template` in {path} must render one user message; substring not found."
    )
    path = folder / "chat_template.jinja"
    path.write_text("{% if")
    with pytest.raises(ValueError, match="`") as error:
        load_chat_template(folder)
    assert str(error.value) == (
        f"`{path}` must be a Jinja template; got unexpected 'end of template'."
    )


IDS = "ids in [0, 263)"
BAD_SETTINGS = {
    "a text for a stop id": ("config.json", "eos_token_id", "x", IDS),
    "a stop id beyond the vocabulary": ("config.json", "eos_token_id", 263, IDS),
    "a negative stop id": ("generation_config.json", "eos_token_id", [1, -1], IDS),
    "a stop id that is true": ("generation_config.json", "eos_token_id", True, IDS),
    "a number for a token": (
        "tokenizer_config.json",
        "bos_token",
        3,
        "a text, or an object with the text `content`",
    ),
    "a token without content": (
        "tokenizer_config.json",
        "eos_token",
        {"content": None},
        "a text, or an object with the text `content`",
    ),
    "a text for a truth": ("tokenizer_config.json", "add_bos_token", "x", "true or false"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_by_file_and_field(folder, case):
    file, field, value, rule = BAD_SETTINGS[case]
    config = {field: value} if file == "config.json" else {}
    write(folder, file, **{field: value})
    with pytest.raises(ValueError, match="`") as error:
        load_tokenizer(folder, config)
    verb = "hold" if field == "eos_token_id" else "be"
    assert str(error.value) == f"`{field}` in {folder / file} must {verb} {rule}; got {value!r}."


def test_stop_ids_are_those_of_the_model_that_has_more_rows_than_the_tokenizer(folder):
    assert load_tokenizer(folder, {"eos_token_id": 299, "vocab_size": 300}).stop_ids[0] == 299


def test_a_bos_token_that_is_to_be_added_must_be_there(folder):
    write(folder, "tokenizer_config.json", bos_token="zzz", add_bos_token=True)
    with pytest.raises(ValueError, match="`") as error:
        load_tokenizer(folder, {})
    assert str(error.value) == (
        f"`bos_token` in {folder / 'tokenizer_config.json'} must be a token of tokenizer.json: the"
        " file says `add_bos_token`; got 'zzz'."
    )


def test_a_text_without_tokens_is_refused():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="`") as error:
        HFTokenizer(tokenizer, bos_id=None, stop_ids=()).encode("b")
    assert str(error.value).startswith("`text` must have tokens; got: ")


BAD_TEMPLATES = {
    "syntax": ("{% for %}", "`place` must be a Jinja template; got "),
    "refuses": (
        "{{ raise_exception('only two roles') }}",
        "`place` must render one user message; only two roles.",
    ),
    "attributes of Python": (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "`place` must render one user message; access to attribute '__class__'",
    ),
    "changes": ("{{ messages.append(1) }}", "`place` must render one user message; "),
    "a file": ("{% include '/etc/passwd' %}", "`place` must render one user message; "),
    "a huge loop": (
        "{% for i in range(999999999) %}{% endfor %}",
        "`place` must render one user message; ",
    ),
    "a macro that never ends": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "`place` must render one user message; maximum recursion depth exceeded",
    ),
    "deep syntax": ("{{ " + "(" * 9999, "`place` must be a Jinja template; got "),
    "an encoding": (
        "{{ messages[0].content.encode('ascii') }}",
        "`place` must render one user message; 'ascii' codec can't encode character",
    ),
    "a value": (
        "{{ 'x'.index('y') }}",
        "`place` must render one user message; substring not found.",
    ),
    "no filter": (
        "{{ x | nofilter }}",
        "`place` must be a Jinja template; got No filter named 'nofilter'.",
    ),
    "arithmetic": ("{{ 1 / 0 }}", "`place` must render one user message; division by zero."),
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_a_bad_template_is_refused_and_runs_nothing(name):
    source, message = BAD_TEMPLATES[name]
    with pytest.raises(ValueError, match="`place`") as error:
        ChatTemplate(source, {}, "`place`").render("hí")
    assert str(error.value).startswith(message)
    assert not str(error.value).endswith("..")


def test_a_chat_tokenizer_encodes_the_conversation(folder):
    tokenizer = load_tokenizer(folder, {})
    chat = ChatTokenizer(tokenizer, ChatTemplate(TEMPLATE, {"bos_token": "<s>"}, "t"))
    assert isinstance(chat, Tokenizer)
    assert chat.encode("abc") == [id_of(x) for x in ("<s>", "<u>", "abc", "</u>", "<s>")]
    assert chat.encode("abc", bos=False) == [id_of("abc")]
    assert chat.decode(chat.encode("abc")) == "abc"
    for name in ("bos_id", "stop_ids", "vocab_size"):
        assert getattr(chat, name) == getattr(tokenizer, name)


def test_load_model_takes_a_folder(folder, tmp_path):
    target = copy_of("llama2", tmp_path / "models", vocab_size=None) / "."
    with pytest.raises(ValueError, match=r"`vocab_size` in .* must be an integer from 1 to"):
        load_hf(target)
    target = copy_of("llama2", tmp_path / "more")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (target / file).write_bytes((folder / file).read_bytes())
    loaded = load_model(str(target))
    assert (loaded.name, loaded.decoder.config.dtype) == ("llama2", "bfloat16")
    assert isinstance(loaded.tokenizer, HFTokenizer)
    with pytest.raises(ValueError, match=r"^`chat` needs a model with a chat template; llama2 has"):
        loaded.as_chat()
    (target / "chat_template.jinja").write_text(TEMPLATE)
    chat = load_model(str(target), dtype="float32").as_chat()
    assert chat.decoder.config.dtype == "float32"
    assert chat.tokenizer.encode("abc")[1] == id_of("<u>")
