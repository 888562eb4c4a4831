"""What a chat is made of."""

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A user's turn and the answer it should get."""

    user: str
    assistant: str
