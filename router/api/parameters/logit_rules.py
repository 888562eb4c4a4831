"""From a body's bias, allowed tokens and bad words to the engine's rules."""

from __future__ import annotations

from engine.contract.messages import LogitRules
from router.api.bodies.generate_body import GenerateBody
from router.api.prompts import check_vocabulary, encode_all
from router.service import RouterService


async def logit_rules(service: RouterService, body: GenerateBody) -> LogitRules | None:
    """The rules of a request; None when it has none.

    Raises:
        InvalidRequestError: A token id is none of the model's.
    """
    if not body.logit_bias and body.allowed_token_ids is None and not body.bad_words:
        return None
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    check_vocabulary(tuple(bias), service.vocab_size(), param="logit_bias")
    check_vocabulary(body.allowed_token_ids or (), service.vocab_size(), param="allowed_token_ids")
    bad_words = await _bad_words(service, body.bad_words or ())
    if not bias and not bad_words and body.allowed_token_ids is None:
        return None
    allowed = None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids))
    return LogitRules(bias=tuple(bias.items()), allowed_token_ids=allowed, bad_words=bad_words)


async def _bad_words(service: RouterService, words: list[str] | tuple[()]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it stands at the beginning of a text and behind a space."""
    texts: list[str] = []
    for word in words:
        bare = word.lstrip()
        texts += (word, bare, f" {bare}")
    if not texts:
        return ()
    rows = await encode_all(service, texts, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in rows if ids))
