"""What proposes draft tokens, as the scheduler asks for it. Free of torch."""

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

    token_ids: [num_tokens] all its known tokens, prompt and output; a view that holds until ``propose`` returns, not
        to be written to.
    max_tokens: as many drafts are of use, at least 1.
    num_prompt_tokens: the first so many are the prompt, the others were said by the model.
    salt: requests with different ones must not learn of each other.
    sampling: how its tokens are drawn.
    prediction: follows the output along what the caller predicted of it; None where nothing was predicted.
    grammar: tells which drafts fit the request's grammar; None where it has none.
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
    """What a proposer says about one request.

    token_ids: guesses of what comes next, none where there is no good one.
    evidence: 0 or more; drafts with the same number are about as likely to be right, and with a larger one more so.
    """

    token_ids: Sequence[int] | IntArray
    evidence: int = 0


class Proposer(Protocol):
    """Guesses what follows the tokens of running requests.

    A guess changes no token of any request, only how many steps it takes: wrong ones cost the positions that were
    computed for them. It is asked in every step, on the thread that schedules.
    """

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """Draft tokens for each of these requests, in order: at most its ``max_tokens``."""


class ModelProposer(Proposer, Protocol):
    """One whose drafts take time: it is asked for as many as are to be verified, and only where nobody else has any.

    It holds something of each request.
    """

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests have ended; each is told once."""

    def close(self) -> None:
        """Free what it computes with. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Who proposes, and how many draft tokens a request may have in one step.

    model: is asked where ``proposer`` has no drafts.
    max_predicted_tokens: the same for a request whose caller predicted its output; 0: as many.
    serves_all: False where it proposes for such requests alone.
    is_adaptive: only as many as are measured to pay, and none where they do not.
    """

    proposer: Proposer
    max_draft_tokens: int
    model: ModelProposer | None = None
    max_predicted_tokens: int = 0
    serves_all: bool = True
    is_adaptive: bool = False

    def most_samples(self, max_num_seqs: int) -> int:
        """Samples of a step at most, where so many requests may run.

        Drafts of predictions alone get those that the requests leave, and as many as one request may have: nothing
        needs much more memory than without them.
        """
        return max_num_seqs * (1 + self.max_draft_tokens) if self.serves_all else max_num_seqs + self.max_draft_tokens

    def __post_init__(self) -> None:
        if self.max_draft_tokens < 1:
            raise ConfigError(f"max_draft_tokens must be at least 1, got {self.max_draft_tokens}")
