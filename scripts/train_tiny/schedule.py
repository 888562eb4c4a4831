"""How far the training is, and the learning rate at that point."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm-up, a constant part, and a linear decay to almost nothing.

    The training ends after ``num_steps`` or, if given, ``max_minutes``, whichever comes first; a slow machine
    then sees fewer steps of the same schedule.
    """

    num_steps: int
    max_minutes: float | None = None
    num_warmup_steps: int = 100
    decay_start: float = 0.7
    final_scale: float = 0.02

    def progress(self, step: int, elapsed_s: float) -> float:
        """The share of the training that is done, 0 to 1."""
        by_steps = step / self.num_steps
        by_time = elapsed_s / (60 * self.max_minutes) if self.max_minutes else 0.0
        return min(max(by_steps, by_time), 1.0)

    def scale(self, step: int, progress: float) -> float:
        """What the peak learning rate is multiplied by."""
        warmup = min((step + 1) / self.num_warmup_steps, 1.0)
        left = (1.0 - progress) / (1.0 - self.decay_start)
        return warmup * max(min(left, 1.0), self.final_scale)
