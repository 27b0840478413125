"""Reading a tokenizer from a folder, ids and back, and the chat template in its sandbox."""

import json
from datetime import datetime

import pytest

from nanodflash.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be <b>short</b>."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "user", "content": "안녕 & bye"},
]
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path, byte_level_tokenizer):
    byte_level_tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def with_template(tokenizer, template):
    return Tokenizer(tokenizer.backend, template, {"eos_token": "<|end|>"})


def test_round_trip(any_tokenizer):
    text = "hello STOP 안녕 👍🏽 Cafe\u0301"
    assert any_tokenizer.decode(any_tokenizer.encode(text)) == text


def test_special_tokens_are_read_but_not_added_or_shown(byte_level_tokenizer):
    backend = byte_level_tokenizer.backend
    start, end = backend.token_to_id("<|start|>"), backend.token_to_id("<|end|>")
    ids = byte_level_tokenizer.encode("<|start|>a<|end|>")
    assert ids == [start, *byte_level_tokenizer.encode("a"), end]
    assert byte_level_tokenizer.decode(ids) == "a"
    assert byte_level_tokenizer.encode("") == []


def test_ids_without_a_token_decode_to_nothing(any_tokenizer):
    ids = any_tokenizer.encode("hello")
    padded = any_tokenizer.vocab_size
    assert any_tokenizer.decode([padded, *ids, padded + 1000]) == "hello"
    assert any_tokenizer.decode([]) == ""


def test_lone_surrogate_is_refused(byte_level_tokenizer):
    with pytest.raises(ValueError, match="valid Unicode"):
        byte_level_tokenizer.encode("a\ud800")


def test_saved_truncation_and_padding_are_ignored(folder, byte_level_tokenizer):
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    text = "a long text of many tokens"
    assert Tokenizer.from_folder(folder).encode(text) == byte_level_tokenizer.encode(text)


def test_folder_without_config(folder, byte_level_tokenizer):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == byte_level_tokenizer.vocab_size
    with pytest.raises(ValueError, match="raw prompt"):
        tokenizer.chat(USER)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json in"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is not a valid tokenizer file"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a valid tokenizer file"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        (
            "tokenizer_config.json",
            "[]",
            r"tokenizer_config\.json must hold a JSON object, got list",
        ),
    ],
)
def test_broken_files(folder, name, text, message):
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(folder)


def test_template_and_special_tokens_from_the_config(folder):
    eos = {"content": "<|end|>", "lstrip": False, "special": True}
    write_config(
        folder,
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
        bos_token="<|start|>",
        eos_token=eos,
        pad_token=None,
    )
    assert Tokenizer.from_folder(folder).chat(USER) == "<|start|>Hi<|end|>"


def test_named_templates_and_the_template_file(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write_config(folder, chat_template=named)
    assert Tokenizer.from_folder(folder).chat(USER) == "default"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat(USER) == "file"


def test_template_environment(byte_level_tokenizer):
    template = """
    {%- for message in messages %}
        {%- if message.role == 'system' %}{% continue %}{% endif %}
        {{- message | tojson }}
    {% endfor %}
{{- strftime_now('%Y') }} {{ enable_thinking }} {{ add_generation_prompt }}"""
    messages = [CHAT[0], {"role": "user", "content": "<안녕 & 'bye'>"}]
    year = datetime.now().year
    assert with_template(byte_level_tokenizer, template).chat(messages, enable_thinking=True) == (
        '{"role": "user", "content": "<안녕 & \'bye\'>"}' + f"\n{year} True True"
    )


def test_lines_of_template_blocks_leave_no_space(byte_level_tokenizer):
    template = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    )
    assert with_template(byte_level_tokenizer, template).chat(USER * 2) == "Hi\nHi\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
    ],
)
def test_failing_templates(byte_level_tokenizer, template, message):
    with pytest.raises(ValueError, match=f"chat template failed: .*{message}"):
        with_template(byte_level_tokenizer, template).chat(USER)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        USER[0],
        ["Hi"],
        [{"role": "user"}],
        [*USER, {"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    ],
)
def test_messages_of_another_form(byte_level_tokenizer, messages):
    with pytest.raises(ValueError, match="messages must be a non-empty list of dicts"):
        with_template(byte_level_tokenizer, "").chat(messages)


@pytest.mark.parametrize("thinking", [False, True])
def test_qwen3_chat_agrees_with_transformers(qwen3_folder, qwen3_tokenizer, thinking):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(qwen3_folder)
    expected = reference.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    prompt = qwen3_tokenizer.chat(CHAT, enable_thinking=thinking)
    assert prompt == expected
    assert prompt.endswith("</think>\n\n") is not thinking
    assert qwen3_tokenizer.encode(prompt) == reference.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("chat_template", v) for v in (["x"], [{"name": "default"}], [5], 5, True, {"a": "b"})),
        ("chat_template", [{"name": "default", "template": 5}]),
        ("chat_template", [{"name": ["default"], "template": "x"}]),
        *((f"{t}_token", v) for t in ("bos", "eos", "pad") for v in ({"x": 1}, 5, True, ["x"])),
        ("eos_token", {"content": None}),
    ],
)
def test_a_config_of_another_form(folder, key, value):
    write_config(folder, **{key: value})
    with pytest.raises(
        ValueError, match=rf"^[^\n]*tokenizer_config\.json: {key} is [^\n]*, want"
    ) as e:
        Tokenizer.from_folder(folder)
    assert repr(value) in str(e.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_text_files_of_another_encoding(folder, name):
    (folder / name).write_bytes(b'{"caf\xe9": 1}')
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8 text"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_json_that_python_gives_up_on(folder, text):
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("before", [0, 500])
def test_a_lone_surrogate_is_shown_in_the_users_text(byte_level_tokenizer, before):
    """Near enough to be found in a long text, and without what the template adds."""
    text = "a " * before + "here\ud800there"
    tokenizer = with_template(byte_level_tokenizer, "[system]{{ messages[0].content }}")
    for use in (
        lambda: tokenizer.chat([{"role": "user", "content": text}]),
        lambda: tokenizer.encode(text),
    ):
        with pytest.raises(ValueError, match=r"valid Unicode, got '[^\n]*here\\ud800there'$") as e:
            use()
        assert "system" not in str(e.value)
        assert len(str(e.value)) < 150
