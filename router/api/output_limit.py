"""How many tokens an answer may have: by its body or a default, within the model's context."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """``asked_for`` is the body's value, in its parameter ``param``; without one, ``default`` applies.

    Without either the answer may fill the context. 0 asks for no answer, only for data about the prompt. ``most`` is a
    bound for other reasons, never less than ``asked_for``.
    """

    asked_for: int | None
    default: int | None
    param: str = "max_tokens"
    most: int | None = None

    @property
    def is_prompt_only(self) -> bool:
        """True if nothing should be generated."""
        return self.asked_for == 0

    def num_tokens(self, *, num_prompt_tokens: int, max_model_len: int, prompt_param: str) -> int:
        """How many tokens the engine may generate: at least one, because the engine always generates one.

        Raises:
            ContextLengthError: The prompt leaves no room, or less than was asked for.
        """
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                num_prompt_tokens=num_prompt_tokens, max_model_len=max_model_len, max_tokens=None, param=prompt_param
            )
        if self.asked_for is None:
            return min(num for num in (room, self.default, self.most) if num is not None)
        if self.asked_for > room:
            raise ContextLengthError(
                num_prompt_tokens=num_prompt_tokens,
                max_model_len=max_model_len,
                max_tokens=self.asked_for,
                param=self.param,
            )
        return max(self.asked_for, 1)

    def num_prompt_tokens(self, *, max_model_len: int) -> int:
        """The longest prompt that leaves room for the answer; at least one token.

        A default that would leave no room for the prompt yields to it, as it does for any prompt.
        """
        wanted = self.default if self.asked_for is None else self.asked_for
        if self.asked_for is None and wanted is not None and wanted >= max_model_len:
            wanted = None
        return max(max_model_len - max(wanted or 1, 1), 1)

    def check_min_tokens(self, min_tokens: int, *, max_tokens: int) -> None:
        """Refuse a minimum that exceeds the maximum.

        Raises:
            InvalidRequestError: ``min_tokens`` is larger than what was asked for, or than ``max_tokens``.
        """
        if min_tokens <= (max_tokens if self.asked_for is None else self.asked_for):
            return
        most = f"at most {max_tokens} tokens can be generated"
        if self.asked_for is not None:
            most = f"{self.param} is {self.asked_for}"
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, but {most}", code="invalid_parameter", param="min_tokens"
        )
