"""The Protocols of proposers of draft tokens, as the scheduler asks them. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.contract.errors import ConfigError
from engine.contract.grammar import GrammarFollower
from engine.contract.messages import SamplingParams
from engine.contract.prediction.follower import PredictionFollower
from engine.contract.step import IntArray


class DraftContext(NamedTuple):
    """A request that may have draft tokens in the step that is being put together.

    token_ids: [num_tokens] all its known tokens, prompt and output; a read-only view, valid until ``propose`` returns.
    max_tokens: the most drafts that are of use, at least 1.
    num_prompt_tokens: how many of the tokens are the prompt; the model generated the others.
    salt: requests with different salts must not learn from each other.
    sampling: how its tokens are sampled.
    prediction: follows the output along the caller's prediction; None without one.
    grammar: tells which drafts fit the request's grammar; None without one.
    """

    request_id: str
    token_ids: IntArray
    max_tokens: int
    num_prompt_tokens: int = 0
    salt: str | None = None
    sampling: SamplingParams | None = None
    prediction: PredictionFollower | None = None
    grammar: GrammarFollower | None = None


class Draft(NamedTuple):
    """A proposal for one request.

    token_ids: guesses of the next tokens; empty where there is no good guess.
    evidence: 0 or more. Drafts with the same number are about equally likely to be right; a larger number is likelier.
    """

    token_ids: Sequence[int] | IntArray
    evidence: int = 0


class Proposer(Protocol):
    """Guesses the next tokens of running requests.

    A guess changes no token of any request, only how many steps it takes; a wrong guess costs the positions computed
    for it. A proposer is asked in every step, on the thread that schedules.
    """

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """Drafts for each of these requests, in order, each with at most its ``max_tokens``."""


class ModelProposer(Proposer, Protocol):
    """A proposer whose drafts take time: asked only for drafts to be verified, where no other proposer has any.

    It keeps state for each request.
    """

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the state of requests that have ended; called once for each."""

    def close(self) -> None:
        """Free the model and its memory. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Which proposers are asked, and how many draft tokens a request may have in one step.

    model: asked where ``proposer`` has no drafts.
    max_predicted_tokens: the most drafts for a request whose caller predicted its output; 0: as many as for others.
    serves_all: False where drafts are proposed only for such requests.
    is_adaptive: use only as many drafts as are measured to pay, and none where they do not.
    """

    proposer: Proposer
    max_draft_tokens: int
    model: ModelProposer | None = None
    max_predicted_tokens: int = 0
    serves_all: bool = True
    is_adaptive: bool = False

    def most_samples(self, max_num_seqs: int) -> int:
        """The most samples of a step with up to ``max_num_seqs`` requests.

        Where only predictions are drafted, they get the samples that requests leave, and as many as one request may
        have: nothing needs much more memory than without drafts.
        """
        return max_num_seqs * (1 + self.max_draft_tokens) if self.serves_all else max_num_seqs + self.max_draft_tokens

    def __post_init__(self) -> None:
        if self.max_draft_tokens < 1:
            raise ConfigError(f"max_draft_tokens must be at least 1, got {self.max_draft_tokens}")
