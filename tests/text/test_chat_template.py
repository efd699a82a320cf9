"""Chat templates: rendered as transformers renders them, refused clearly, and in a sandbox."""

import enum

import pytest
from text_models import default_model, smollm2

from jaxspec.errors import ConfigError
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.tokenizer import Tokenizer, save_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FEATURES = """{% set ns = namespace(count=0, last='') %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if loop.index0 > 3 %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {{ message | tojson }} {{ message.content | tojson(indent=2) }} {{ dict(a=1)['a'] }}
    {% generation %}{{ message.content }}{% set inside = 1 %}{% endgeneration %}
    {{ inside is defined }}
{% endfor %}
{{ ns.count }} {{ add_generation_prompt }} {{ pad_token is defined }} {{ documents is none }}
"""
# What OpenAI's harmony template does: macros with defaults that call each other, a date, and flags in a namespace.
HARMONY = """{%- macro render_type(spec, nullable=false) -%}
    {%- if spec.kind is defined and spec.kind is string -%}
        {{- spec.kind }}{%- if nullable %}{{- " | null" }}{% endif -%}
    {%- elif spec is iterable and spec is not string -%}
        {%- for each in spec -%}
            {{- render_type({"kind": each}, true) }}{%- if not loop.last %}, {% endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- spec | tojson }}
    {%- endif -%}
{%- endmacro -%}
{%- macro build_system_message() -%}
    {%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
    {{- model_identity + "\\nYear: " + strftime_now("%Y") + "\\n" }}
    {{- "Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{{- build_system_message() }}
{{- "<|end|>" }}
{%- set last = namespace(role=none, turns=0) %}
{%- for message in messages -%}
    {%- if "<|channel|>" in message.content %}{{- raise_exception("no channels in the content") }}{%- endif %}
    {%- set last.role = message.role %}{%- set last.turns = last.turns + 1 %}
    {{- "<|start|>" + message["role"] + "<|message|>" + message.content }}
    {{- render_type(["a", message.role]) + "<|end|>" }}
{%- endfor -%}
{{- last.turns ~ last.role }}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
TEMPLATES = {"harmony": HARMONY, "chatml": CHATML, "features": FEATURES}

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": ' Be <b>brief</b> & "kind". '}, {"role": "user", "content": "Grüße, 你好"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " two "},
        {"role": "user", "content": "three\n\n"},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(name, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    theirs, _ = render_jinja_template(
        conversations=CONVERSATIONS, chat_template=source, add_generation_prompt=prompt, **TOKENS
    )
    assert [ChatTemplate(source, TOKENS).render(each, prompt) for each in CONVERSATIONS] == theirs


def test_default_model_equals_transformers(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = smollm2()
    save_tokenizer(default_model(), tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.encode("Grüße <|im_end|>\n 12") == tokenizer.encode("Grüße <|im_end|>\n 12")
    assert theirs.eos_token_id == 2
    for conversation in CONVERSATIONS:
        for prompt in (True, False):
            ids = theirs.apply_chat_template(conversation, add_generation_prompt=prompt, return_dict=False)
            assert tokenizer.encode_chat(conversation, add_generation_prompt=prompt) == ids


class Role(enum.StrEnum):
    USER = "user"


def test_templates_see_plain_data():
    message = {"role": Role.USER, "content": "Hi", "name": "Ada", "parts": (1, 2)}
    template = ChatTemplate("{{ messages[0].role.upper() }} {{ messages[0].name }} {{ messages[0].parts }}", {})
    assert template.render([message]) == "USER Ada [1, 2]"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", "must be a list of dicts"),
        ([], "messages is empty"),
        (["Hi"], "message 0 must be a dict"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "user"}],
            "message 1 must have a string 'content', which is missing",
        ),
        ([{"role": 1, "content": "Hi"}], "message 0 must have a string 'role', got int"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "string 'content', got list"),
        ([{"role": "user", "content": "Hi", "image": object()}], "plain JSON data"),
    ],
)
def test_malformed_messages_are_refused(messages, words):
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(CHATML, TOKENS).render(messages)


def test_a_template_may_refuse():
    with pytest.raises(ConfigError, match="no channels in the content"):
        ChatTemplate(HARMONY, TOKENS).render([{"role": "assistant", "content": "<|channel|>"}])


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ nothing() }}"]
)
def test_broken_templates_are_config_errors(source):
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source, TOKENS).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns._secret = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source):
    with pytest.raises(ConfigError):
        ChatTemplate(source, TOKENS).render(CONVERSATIONS[0])


def test_no_template():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata))
    assert not tokenizer.has_chat_template and smollm2().has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.apply_chat_template(CONVERSATIONS[0])
