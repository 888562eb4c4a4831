"""How many tokens an answer took."""

from __future__ import annotations

from collections.abc import Sequence

from router.request.text_output import TextOutput


def usage(outputs: Sequence[TextOutput], *, num_choices_per_prompt: int = 1) -> dict[str, object]:
    """OpenAI's usage object. A prompt with several choices counts once."""
    prompts = outputs[::num_choices_per_prompt]
    return _usage(
        num_prompt_tokens=sum(output.num_prompt_tokens for output in prompts),
        num_output_tokens=sum(output.num_output_tokens for output in outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in prompts),
    )


def running_usage(output: TextOutput, num_output_tokens: int) -> dict[str, object]:
    """The usage of one choice, up to so many tokens of it."""
    return _usage(
        num_prompt_tokens=output.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
    )


def _usage(*, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
