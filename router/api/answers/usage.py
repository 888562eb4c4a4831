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
        details=_details(outputs),
    )


def running_usage(output: TextOutput, num_output_tokens: int) -> dict[str, object]:
    """The usage of one choice, up to so many tokens of it."""
    return _usage(
        num_prompt_tokens=output.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
        details=_details([output]),
    )


def _details(outputs: Sequence[TextOutput]) -> dict[str, int]:
    """The tokens of thinking, markers included, of a model that thinks; and what became of predictions: their tokens
    that the outputs said, and those that they did not. Drafts that workers made of outputs count as predictions of
    those that nobody else predicted."""
    details: dict[str, int] = {}
    thinking = [output.turn.num_reasoning_tokens for output in outputs if output.turn and output.turn.has_reasoning]
    if thinking:
        details["reasoning_tokens"] = sum(thinking)
    predicted = [counts for output in outputs if (counts := output.num_predicted) is not None]
    if predicted:
        details["accepted_prediction_tokens"] = sum(num_accepted for num_accepted, _ in predicted)
        details["rejected_prediction_tokens"] = sum(num_rejected for _, num_rejected in predicted)
    return details


def _usage(
    *, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int, details: dict[str, int]
) -> dict[str, object]:
    fields: dict[str, object] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if details:
        fields["completion_tokens_details"] = details
    return fields
