"""Writes docs/models.md from the registry of architectures: `python -m scripts.models_page > docs/models.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.layers.rope_config import RopeType
from engine.model.model_config import SUPPORTED_ACTIVATIONS, SUPPORTED_DTYPES
from engine.model.registry import architectures

HEADER = """# Models

Baton takes Hugging Face directories: config.json, weights as safetensors (one file, or shards with their index), and
tokenizer.json. `architectures` in config.json says what a checkpoint is; `baton models` lists the same as this page.
Those of the table are computed natively: layers are fused, keys and values lie in paged blocks, layers with a window
keep the KV of their window only (`baton plan` counts it so). What a checkpoint asks for and Baton does not compute is
refused by name, before anything starts.

This page is written from the registry by `python -m scripts.models_page > docs/models.md`.

| `architectures` | family | what it is | runs on |
|---|---|---|---|
"""

FOOTER = """
The tests compare each of them with transformers in float32, on small random checkpoints: logits of whole prompts and of
pieces, greedy and seeded tokens of one engine, and of a prefill and a decode engine that hands KV over
(`tests/engine/model/`, `tests/integration/`).

## What config.json may ask for

| | |
|---|---|
{rows}
Where config.json names no precision, the weights' own counts. On GPUs, which compute in 16 bits only, `dtype: auto`
takes bfloat16 for checkpoints in float32, as vLLM does, and float16 on GPUs without bfloat16.

Quantized weights are refused, but for the experts of gpt-oss: they load as they are published, in MXFP4, and are
computed in the precision of the model.

**Latent attention** (DeepSeek V2 and V3) caches one vector of `kv_lora_rank + qk_rope_head_dim` numbers a token and
layer, which all heads share: that is what blocks hold, what is handed over, and what tiers keep. It is computed on
CPUs; for GPUs such a checkpoint is refused. The published weights of V3 are in FP8, and are refused as well: convert
them to bfloat16 first. Layers that only draft tokens (`num_nextn_predict_layers`) are not loaded.

**Mixtures of experts** (Mixtral, Qwen3-MoE, gpt-oss, DeepSeek) group the tokens of a step by expert; what a token gets
does not depend on its batch. On GPUs they use torch's grouped product where it has one, else a kernel in Triton that
is tried once at the start, else they go expert by expert, without decode graphs. No GPU has run the kernel in Triton:
its tests interpret it, and compile it for GPUs of 2018 and 2022.

## By transformers' code

`model_impl` says whose code computes a model: `native` is Baton's, for the architectures above; `transformers` is the
code that transformers has for it; `auto`, the default, takes Baton's where there is any. It needs
`pip install baton-serve[transformers]`, and serves decoders of text whose code uses the attention interface of
transformers: Cohere, StableLM, GLM, OLMo, EXAONE, Nemotron, GPT-NeoX, Helium, Arcee, ERNIE and others. Keys and values
lie in the same paged blocks; layers with windows keep the KV of their window only. Linear layers and experts are
computed by Baton's products, those of one input by a single one. One pass without numbers shows before anything starts
how each layer attends. These are refused by name: state spaces and convolutions, encoders, pictures and sound, masks
that are neither causal nor a window, keys and values of different sizes, rotary frequencies that depend on the longest
sequence of a batch (`dynamic`, `longrope`), and quantized weights. Where a checkpoint comes with code of its own
(`auto_map`), transformers' code for its `model_type` computes it; the checkpoint's runs only if `trust_remote_code` is
set, and is refused otherwise where transformers has none.

Norms, MLPs, attention modules and whole layers give way to Baton's own where these **compute the same**: each is tried
in float32 when the model is loaded, with samples of all sizes, at eight positions from the first to the last of the
context. Where one says something else, the model's own code stays. Most families end up with layers that are Baton's
throughout, and run as fast as native ones (`python -m benchmarks.engine --model-impl transformers --peer
native`). In 16 bits they are rounded as native ones are, which is not everywhere as transformers rounds.

## What else is to know

**longrope** has one set of factors for sequences up to `original_max_position_embeddings` and one for longer ones. Keys
that are cached fit only one of them, so an engine has one: the first where `max_model_len` is no longer than the
original length, else the second, for all of its sequences. The first gives what transformers gives; so does the second
for prompts longer than the original length. Engines with different factors do not take KV from each other.

**Caps on attention scores** (`attn_logit_softcapping` of Gemma 2) are computed on CPUs. No attention kernel that
Baton uses on GPUs knows them: there such a checkpoint is refused. What has run on a GPU, [gpu.md](gpu.md) says.

**End-of-sequence tokens** are those of generation_config.json, else those of config.json, and the tokenizer's
`eos_token` in any case. Where there is none, answers end by `max_tokens` and stop strings, and no grammar can be asked
for.

**Checkpoints without the head**, whose tensors lack the prefix `model.` or `transformer.`, load where the head is tied
to the embedding. A head that is stored counts, even if config.json calls it tied.
"""


def page() -> str:
    """The page as it should be."""
    rows = "".join(f"| {key} | {values} |\n" for key, values in _limits())
    return HEADER + "".join(_architecture_rows()) + FOOTER.format(rows=rows)


def _architecture_rows() -> Iterator[str]:
    for fact in architectures():
        devices = "CPU, GPU" if fact.cpu_only is None else f"CPU (GPUs lack {fact.cpu_only})"
        yield f"| `{fact.name}` | {fact.family} | {fact.description} | {devices} |\n"


def _limits() -> Iterator[tuple[str, str]]:
    yield "precision (`dtype`)", _listed(SUPPORTED_DTYPES)
    yield "activation", _listed(SUPPORTED_ACTIVATIONS)
    yield "rotary scaling (`rope_type`)", f"{_listed(RopeType)}; `su`, and `yarn` of Phi-3, are longrope"
    yield "rotation of a part of each head (`partial_rotary_factor`)", "Phi-3"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(page(), end="")
