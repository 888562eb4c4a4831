"""The byte-level BPE tokenizer and the chat format."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .messages import Message, Role

VOCAB_SIZE = 1536
TOKENIZER_NAME = "tokenizer.json"
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLE_TOKENS = {Role.SYSTEM: "<|system|>", Role.USER: "<|user|>", Role.ASSISTANT: "<|assistant|>"}
SPECIAL_TOKENS = (PAD, BEGIN, END, *ROLE_TOKENS.values())

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- if tools -%}{{- '<|system|>Tools:' -}}"
    "{%- for tool in tools -%}{%- set function = tool['function'] -%}"
    "{%- set parameters = function['parameters'] or {} -%}"
    "{{- '\\n' ~ function['name'] ~ '(' -}}"
    "{%- for name, schema in (parameters['properties'] or {}).items() -%}"
    "{{- ('' if loop.first else ', ') ~ name ~ ('' if name in (parameters['required'] or []) else '?') ~ ': ' -}}"
    "{%- if schema['enum'] -%}{{- schema['enum'] | join('|') -}}"
    "{%- elif schema['type'] is string -%}{{- schema['type'] -}}"
    "{%- else -%}{{- (schema['type'] or ['any']) | join('|') -}}{%- endif -%}"
    "{%- endfor -%}"
    "{{- ')' ~ (' ' ~ function['description'] if function['description'] else '') -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('Unknown role: ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{%- if message['content'] is string -%}{%- set text = message['content'] -%}"
    "{%- else -%}{%- set text = message['content'] | map(attribute='text') | join(' ') -%}{%- endif -%}"
    "{%- set role = message['role'] -%}"
    "{%- if role == 'tool' -%}{%- set role = 'user' -%}{%- set text = 'Result: ' ~ text -%}{%- endif -%}"
    "{{- '<|' ~ role ~ '|>' ~ text | trim -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\\n' ~ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson -}}"
    "{{- '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` tokens; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer saved as ``tokenizer.json`` in ``directory``."""
    return Tokenizer.from_file(str(directory / TOKENIZER_NAME))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


def render(messages: Iterable[Message], *, add_generation_prompt: bool) -> str:
    """The text of a chat as the template in ``tokenizer_config.json`` renders it."""
    body = "".join(f"{ROLE_TOKENS[message.role]}{message.text}{END}" for message in messages)
    return f"{BEGIN}{body}{ROLE_TOKENS[Role.ASSISTANT] if add_generation_prompt else ''}"
