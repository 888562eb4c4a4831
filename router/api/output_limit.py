"""How many tokens an answer may have: what its body asks for, or a default, within the model's context."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """``asked_for`` is what the body says, in its parameter ``param``; ``default`` holds if it says nothing.

    Without either the answer fills the context. 0 asks for no answer, but for what there is to say of the prompt.
    ``most`` is how many tokens an answer may have for other reasons, and never less than ``asked_for``.
    """

    asked_for: int | None
    default: int | None
    param: str = "max_tokens"
    most: int | None = None

    @property
    def is_prompt_only(self) -> bool:
        """True when nothing is to be generated."""
        return self.asked_for == 0

    def num_tokens(self, *, num_prompt_tokens: int, max_model_len: int, prompt_param: str) -> int:
        """How many tokens the engine may generate: at least one, which it cannot do without.

        Raises:
            ContextLengthError: The prompt leaves no room, or not as much as was asked for.
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
        """How many tokens of a prompt leave room for the answer; at least one.

        A default that would leave the prompt nothing gives way to it, as it does to any prompt.
        """
        wanted = self.default if self.asked_for is None else self.asked_for
        if self.asked_for is None and wanted is not None and wanted >= max_model_len:
            wanted = None
        return max(max_model_len - max(wanted or 1, 1), 1)

    def check_min_tokens(self, min_tokens: int, *, max_tokens: int) -> None:
        """Refuse to generate at least more than at most.

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
