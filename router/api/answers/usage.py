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
        num_reasoning_tokens=_num_reasoning_tokens(outputs),
    )


def running_usage(output: TextOutput, num_output_tokens: int) -> dict[str, object]:
    """The usage of one choice, up to so many tokens of it."""
    return _usage(
        num_prompt_tokens=output.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
        num_reasoning_tokens=_num_reasoning_tokens([output]),
    )


def _num_reasoning_tokens(outputs: Sequence[TextOutput]) -> int | None:
    """The tokens of thinking, markers included; None for a model that does not think."""
    counts = [output.turn.num_reasoning_tokens for output in outputs if output.turn and output.turn.has_reasoning]
    return sum(counts) if counts else None


def _usage(
    *, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int, num_reasoning_tokens: int | None
) -> dict[str, object]:
    fields: dict[str, object] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return fields
