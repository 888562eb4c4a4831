"""The rows of the parity matrix: what a request can ask for.

A feature adds its row here, and nothing else: every column asks it. tests/parity/test_completeness.py finds parameters
that no row sends.
"""

from __future__ import annotations

from typing import Any

from tests.support.parity.feature import MESSAGES, TEXT, Feature

BEGIN, END = 1, 2
"""Special tokens of the model; END ends an answer."""

LETTER_A = 67
"""The token that is the letter a."""

FEW = [70, 80, 90]
LETTERS = [*range(LETTER_A, LETTER_A + 26)]
SAMPLED: dict[str, Any] = {"temperature": 1.3, "seed": 7}

SAYS_A: dict[str, Any] = {"logit_bias": {str(LETTER_A): 100}}
"""The model says nothing but a."""

SAYS_A_OR_B: dict[str, Any] = {"logit_bias": {str(LETTER_A): 100, str(LETTER_A + 1): 100}, "temperature": 1, "seed": 2}

PREDICTION = {"type": "content", "content": [{"type": "text", "text": "aaaba"}, {"type": "text", "text": "aababba"}]}
"""Right in part."""

WANTS_TO_END: dict[str, Any] = {"logit_bias": {str(END): 100}}
TOOLS: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"enum": [10, 20]}}, "required": ["a"]},
            },
        }
    ],
    "max_tokens": 90,
}
STREAMED: dict[str, Any] = {"stream": True}
UNTOLD: dict[str, Any] = {"logprobs": None}

GOES_ON: dict[str, Any] = {
    "messages": [*MESSAGES, {"role": "assistant", "content": "well, "}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}

SCHEMA = {
    "type": "object",
    "properties": {"ab": {"enum": ["no", "never", "neither"]}, "c": {"type": "integer"}},
    "required": ["ab", "c"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "small", "strict": True, "schema": SCHEMA}}
REGEX = "[d-h]{2,5}[A-Z0-9]{4}[.!]{1,9}"
"""It can end before the most tokens of an answer, and after."""

FEATURES = (
    Feature(name="greedy", fields={}, same_answer="it is the plain answer"),
    Feature(name="no log-probabilities", fields={"logprobs": None, "return_token_ids": None}),
    # What is drawn.
    Feature(name="sampling", fields=SAMPLED),
    Feature(name="sampling of few", fields={"top_k": 30, "top_p": 0.8, "min_p": 0.1}, needs=SAMPLED),
    Feature(
        name="presence and frequency penalties",
        fields={"presence_penalty": 2.0, "frequency_penalty": 2.0},
        needs={"allowed_token_ids": FEW},
    ),
    Feature(name="repetition penalty", fields={"repetition_penalty": 5.0}),
    Feature(name="nothing twice", fields={"no_repeat_ngram_size": 2}, needs={"allowed_token_ids": FEW}),
    Feature(name="logit bias", fields={"logit_bias": {"70": 4, "80": 4}}),
    Feature(name="allowed tokens", fields={"allowed_token_ids": LETTERS}),
    Feature(name="bad words", fields={"bad_words": ["dd", "de", "eee"]}, needs={"allowed_token_ids": [70, 71]}),
    # What ends an answer.
    Feature(name="fewest tokens", fields={"min_tokens": 9}, needs=WANTS_TO_END),
    Feature(name="ends that are not heeded", fields={"ignore_eos": True}, needs={**WANTS_TO_END, "min_tokens": 6}),
    Feature(name="stop token", fields={"stop_token_ids": [LETTER_A]}, needs={**SAYS_A, "min_tokens": 9}),
    Feature(name="stop string", fields={"stop": ["aaaaaaaaa", "never"]}, needs=SAYS_A),
    Feature(
        name="stop string that is shown",
        fields={"include_stop_str_in_output": True},
        needs={**SAYS_A, "stop": "aaaaaaaaa"},
    ),
    # The shape of an answer.
    Feature(name="json_schema", fields={"response_format": JSON_SCHEMA}),
    Feature(
        name="json_schema of a streamed chat", fields={"response_format": JSON_SCHEMA}, needs=STREAMED, is_chat=True
    ),
    Feature(name="regex", fields={"structured_outputs": {"regex": REGEX}}, needs=SAMPLED),
    Feature(
        name="regex with all that it must get along with",
        fields={"structured_outputs": {"regex": REGEX}},
        needs={
            **SAMPLED,
            "n": 2,
            "logprobs": 3,
            "min_tokens": 9,
            "ignore_eos": True,
            "stop": "!.!",
            "bad_words": ["dd", "e"],
            "logit_bias": {"70": 4},
            "frequency_penalty": 0.5,
        },
    ),
    # Several answers.
    Feature(name="choices", fields={"n": 3}, needs=SAMPLED),
    Feature(name="best of several", fields={"n": 2, "best_of": 4}, needs=SAMPLED),
    Feature(
        name="beam search",
        fields={"beam_width": 4, "n": 2, "length_penalty": 0.7, "early_stopping": "never"},
        needs=UNTOLD,
    ),
    Feature(name="several prompts", fields={"prompt": [TEXT, TEXT[::-1]]}),
    # What is told of tokens.
    Feature(name="log-probabilities of many", fields={"logprobs": 20}),
    Feature(name="tokens named by their ids", fields={"return_tokens_as_token_ids": True}),
    Feature(name="log-probabilities of the prompt", fields={"prompt_logprobs": 2}, is_computed_anew=True),
    Feature(name="echo with log-probabilities", fields={"echo": True}, is_computed_anew=True),
    Feature(name="echo", fields={"echo": True}, needs={"logprobs": None}),
    Feature(
        name="special tokens in the text",
        fields={"skip_special_tokens": False},
        needs={"logit_bias": {str(BEGIN): 100}},
    ),
    # The prompt.
    Feature(name="truncated prompt", fields={"truncate_prompt_tokens": 70, "truncation_side": "right"}),
    # What only the cluster sees.
    Feature(
        name="priority, cache salt and id",
        fields={"priority": -3, "cache_salt": "mine", "request_id": "mine", "add_special_tokens": True},
        same_answer="nobody else is there, ids are not compared, and this tokenizer has nothing to add",
    ),
    Feature(
        name="promises",
        fields={"slo": {"ttft_ms": 50, "itl_ms": 0.5}},
        same_answer="it changes which step computes a prompt's tokens, and no token",
    ),
    # Streams.
    Feature(name="stream", fields=STREAMED),
    Feature(
        name="stream with usage",
        fields={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        needs=STREAMED,
    ),
    Feature(name="stream of choices", fields={"n": 3}, needs={**SAMPLED, **STREAMED}),
    Feature(name="stream with a stop string", fields={"stop": "aaaaaaaaa"}, needs={**SAYS_A, **STREAMED}),
    Feature(name="stream of text alone", fields={"logprobs": None, "return_token_ids": None}, needs=STREAMED),
    # Chats.
    Feature(name="chat", fields={}, is_chat=True, same_answer="it is the plain answer"),
    Feature(name="chat that is limited", fields={"max_completion_tokens": 9, "max_tokens": None}, is_chat=True),
    Feature(
        name="beam search of a chat with all that it must get along with",
        fields={"use_beam_search": True, "best_of": 3, "n": 3},
        needs={
            **UNTOLD,
            "top_logprobs": None,
            "logit_bias": {"70": 4},
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
            "no_repeat_ngram_size": 2,
            "bad_words": ["dd", "e"],
            "min_tokens": 4,
            "stop_token_ids": [LETTER_A, 75, 80, 90],
        },
        is_chat=True,
    ),
    Feature(name="chat with top log-probabilities", fields={"top_logprobs": 5}, is_chat=True),
    Feature(name="chat that goes on", fields=GOES_ON, is_chat=True),
    Feature(name="chat that repeats", fields={"echo": True}, needs=GOES_ON, is_chat=True),
    Feature(
        name="arguments of the template",
        fields={"chat_template_kwargs": {"tone": "calm"}, "reasoning_effort": "low", "verbosity": "high"},
        is_chat=True,
    ),
    Feature(name="stream of a chat", fields=STREAMED, is_chat=True),
    Feature(
        name="tools",
        fields={**TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5, "seed": 3},
        is_chat=True,
    ),
    Feature(name="stream of tools", fields={**TOOLS, "tool_choice": "required"}, needs=STREAMED, is_chat=True),
    Feature(name="reasoning", fields={"enable_thinking": True}, is_chat=True),
    Feature(name="stream of reasoning", fields={"enable_thinking": True}, needs=STREAMED, is_chat=True),
    Feature(
        name="reasoning that is not shown",
        fields={"include_reasoning": False},
        needs={"enable_thinking": True},
        is_chat=True,
    ),
    Feature(name="prediction", fields={"prediction": PREDICTION}, needs=SAYS_A, is_chat=True),
    Feature(
        name="prediction of streamed choices",
        fields={"prediction": PREDICTION},
        needs={**SAYS_A_OR_B, **STREAMED, "n": 2, "stream_options": {"include_usage": True}},
        is_chat=True,
    ),
    # All together.
    Feature(
        name="everything",
        fields={
            "n": 2,
            "logprobs": 3,
            "logit_bias": {"70": 3},
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
            "allowed_token_ids": [*range(40, 200)],
            "no_repeat_ngram_size": 3,
            "bad_words": ["d", "ef"],
            "min_tokens": 8,
            "stop": ["zz", "yy"],
            "stream_options": {"include_usage": True},
            "priority": 2,
            "cache_salt": "mine",
        },
        needs={**SAMPLED, **STREAMED},
    ),
)

WINDOWED_FEATURES = ("greedy", "several prompts", "everything")
"""Rows that models with windows are asked too: one prompt, several at once, and several answers to one."""

NOT_IN_A_ROW = {
    "model": "it names what is served, which is one model",
    "thinking_token_budget": "it asks for a token that ends thinking, and these models have none",
    "guided_json": "an older name of structured_outputs.json",
    "guided_regex": "an older name of structured_outputs.regex",
    "guided_choice": "an older name of structured_outputs.choice",
    "guided_grammar": "an older name of structured_outputs.grammar",
}
"""Fields of a body that no row sends, each with its reason."""
