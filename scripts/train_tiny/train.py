"""The training loop: Muon for the matrices, AdamW for the rest, checkpoints that resume where they were written."""

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .batches import FIRST_CURRICULUM, SECOND_CURRICULUM, Batch, ChatEncoder, Stage, training_batch
from .model import ModelConfig, TinyLlama, training_dtype
from .muon import Muon
from .probes import Probe, probes
from .schedule import Schedule
from .validation import accuracies

logger = logging.getLogger(f"baton.{__name__}")

CHECKPOINT_NAME = "last.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on."""

    schedule: Schedule
    curriculum: tuple[Stage, ...] = FIRST_CURRICULUM
    seed: int = 1
    tokens_per_step: int = 4096
    matrix_lr: float = 0.01
    other_lr: float = 0.004
    max_grad_norm: float = 1.0
    num_threads: int = 2
    compile: bool = True
    log_every_steps: int = 25
    validate_every_steps: int = 250
    checkpoint_every_steps: int = 50
    probes_per_task: int = 64


@dataclass(slots=True)
class RunState:
    """Where a run is: the number of steps done and the seconds they took, over all resumptions."""

    step: int = 0
    elapsed_s: float = 0.0


def second_training(config: TrainConfig) -> TrainConfig:
    """The training of a model that has been through the first: all it can do already, tools and schemas.

    Its learning rates are lower, and fall from early on, so that what was learned is not lost.
    """
    schedule = replace(config.schedule, decay_start=0.4)
    return replace(config, schedule=schedule, curriculum=SECOND_CURRICULUM, matrix_lr=0.005, other_lr=0.002)


class OtherRunError(Exception):
    """The folder holds the checkpoint of a run with other text or of other weights."""


class Trainer:
    """Trains one model in ``directory``, which holds the checkpoint.

    Args:
        start: Weights to begin with, a checkpoint in Hugging Face format; random ones where it is None.

    Raises:
        OtherRunError: The checkpoint is not of this seed and start.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        directory: Path,
        start: Path | None = None,
    ) -> None:
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.model = TinyLlama(model_config, training_dtype())
        self._start_digest = ""
        if start is not None:
            self.model.load_state_dict({name: weight.float() for name, weight in load_file(start).items()})
            self._start_digest = hashlib.sha256(start.read_bytes()).hexdigest()
        self.state = RunState()
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer)
        self._checkpoint = directory / CHECKPOINT_NAME
        self._optimizers = _optimizers(self.model, config)
        self._loss = torch.compile(self._eager_loss, dynamic=False) if config.compile else self._eager_loss
        self._probes: list[Probe] = probes(0, config.probes_per_task, lambda text: len(tokenizer.encode(text).ids))
        if self._checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Train to the end of the schedule, then write the last checkpoint."""
        config = self.config
        losses: list[float] = []
        last = time.monotonic()
        with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("steps", total=config.schedule.num_steps, completed=self.state.step)
            while (progress := config.schedule.progress(self.state.step, self.state.elapsed_s)) < 1.0:
                losses.append(self._step(progress))
                self.state.step += 1
                now = time.monotonic()
                self.state.elapsed_s, last = self.state.elapsed_s + now - last, now
                bar.advance(task)
                if self.state.step % config.log_every_steps == 0:
                    self._log(progress, losses)
                    losses.clear()
                if self.state.step % config.checkpoint_every_steps == 0:
                    self._save()
                if self.state.step % config.validate_every_steps == 0:
                    self.validate()
        self.validate()
        self._save()

    def validate(self) -> dict[str, float]:
        """Measure and log the accuracy on the held-out probes."""
        measured = accuracies(self.model, self._tokenizer, self._probes)
        text = " ".join(f"{task}={value:.3f}" for task, value in measured.items())
        logger.info("held out: step=%d %s", self.state.step, text)
        return measured

    def _step(self, progress: float) -> float:
        config = self.config
        scale = config.schedule.scale(self.state.step, progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * scale
        batch = training_batch(
            self._encoder,
            config.curriculum,
            seed=config.seed,
            step=self.state.step,
            progress=progress,
            num_tokens=config.tokens_per_step,
        )
        loss = self._loss(batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _eager_loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch.token_ids)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        weights = batch.weights.flatten()
        return (losses * weights).sum() / weights.sum()

    def _log(self, progress: float, losses: list[float]) -> None:
        num_tokens = self.state.step * self.config.tokens_per_step
        logger.info(
            "step=%d progress=%.3f loss=%.4f tokens=%.2fM elapsed_s=%.0f tokens_per_s=%.0f",
            self.state.step,
            progress,
            sum(losses) / len(losses),
            num_tokens / 1e6,
            self.state.elapsed_s,
            num_tokens / self.state.elapsed_s,
        )

    def _save(self) -> None:
        content = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.state.step,
            "elapsed_s": self.state.elapsed_s,
            "seed": self.config.seed,
            "start": self._start_digest,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(content, partial)
        partial.replace(self._checkpoint)

    def _load(self) -> None:
        content = torch.load(self._checkpoint, weights_only=True)
        if content["seed"] != self.config.seed:
            raise OtherRunError(
                f"{self._checkpoint} was begun with --seed {content['seed']}, not {self.config.seed}: go on with that "
                "seed, or name another folder with --out"
            )
        if content["start"] != self._start_digest:
            raise OtherRunError(
                f"{self._checkpoint} was begun from other weights: give the same --from, or another --out"
            )
        self.model.load_state_dict(content["model"])
        for optimizer, state in zip(self._optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.state = RunState(step=content["step"], elapsed_s=content["elapsed_s"])
        logger.info("resumed: step=%d elapsed_s=%.0f", self.state.step, self.state.elapsed_s)


def _optimizers(model: TinyLlama, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the weights of the layers' linear maps, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    muon = Muon(
        [{"params": matrices, "peak_lr": config.matrix_lr}], dtype=model.dtype, lr=config.matrix_lr, weight_decay=0.01
    )
    adamw = torch.optim.AdamW(
        [{"params": others, "peak_lr": config.other_lr}], lr=config.other_lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    return [muon, adamw]
