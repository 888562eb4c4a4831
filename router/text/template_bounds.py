"""A sandbox for chat templates that counts steps and characters, and stops before memory or time run out.

The template is the model's, but any caller supplies the values: a megabyte that a template repeats for each of a
thousand messages is a gigabyte. So every operation that makes text first asks the budget for its characters.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter

MAX_STEPS = 2_000_000
"""Steps of one rendering (loop turns, operations and calls): a second or two."""

MAX_CPU_S = 5.0
"""Limit for work that takes long in few steps. It is CPU time of the thread, so a busy machine does not matter."""

WORK_RATIO = 8
"""Characters that one rendering may make in all, as a multiple of the characters that its result may have."""

_STEPS_A_LOOK = 256
_ITEM_CHARACTERS = 56
"""The size of a small object, counted in characters."""

_MAX_INDENT = 16

_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
_FORMAT_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\*|\d{4,})")
_FIELD_WIDTH = re.compile(r"\d{4,}")


SizeOf: TypeAlias = Callable[..., int]
"""From a filter's arguments: the characters that it will make beyond those that it was given."""


class TemplateLimitError(jinja2.TemplateError):
    """A rendering reached a limit."""


class Budget:
    """What one rendering may still spend. Characters and steps are equal on every machine; CPU time is the backstop."""

    def __init__(
        self,
        *,
        max_characters: int,
        max_steps: int = MAX_STEPS,
        max_cpu_s: float = MAX_CPU_S,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.max_characters = max_characters
        self._characters_left = WORK_RATIO * max_characters
        self._max_steps = max_steps
        self._num_steps = 0
        self._max_cpu_s = max_cpu_s
        self._clock = clock
        self._began_s = clock()

    def step(self, number: int = 1) -> None:
        """Count steps.

        Raises:
            TemplateLimitError: There were too many steps, or they took too long.
        """
        before, self._num_steps = self._num_steps, self._num_steps + number
        if self._num_steps > self._max_steps:
            raise TemplateLimitError(f"rendering the chat takes more than {self._max_steps} steps")
        is_time_to_look = before // _STEPS_A_LOOK != self._num_steps // _STEPS_A_LOOK
        if is_time_to_look and self._clock() - self._began_s > self._max_cpu_s:
            raise TemplateLimitError(f"rendering the chat takes more than {self._max_cpu_s:g} s")

    def make(self, num_characters: int) -> None:
        """Ask for a text of ``num_characters`` before it is made.

        Raises:
            TemplateLimitError: The text is too long, or all texts together are.
        """
        self._characters_left -= num_characters
        if num_characters > self.max_characters or self._characters_left < 0:
            raise TemplateLimitError(f"the rendered chat would have more than {self.max_characters} characters")


class _BoundedCode(CodeGenerator):
    """Compiles ``~`` to a call of the environment, which counts it."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja2's name)
        """Join the operands of ``~``."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Formatter(SandboxedFormatter):
    """Makes the fields of a text within the budget."""

    def __init__(self, env: BoundedEnvironment) -> None:
        super().__init__(env)
        self._budget = env.budget

    def format_field(self, value: Any, format_spec: str) -> str:
        """One field, whose width may come from a value."""
        self._budget.step()
        self._budget.make(_size(value) + sum(map(int, _FIELD_WIDTH.findall(format_spec))))
        text: str = super().format_field(value, format_spec)
        return text


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for a text that was escaped."""

    def __init__(self, env: BoundedEnvironment, escape: Callable[[Any], str]) -> None:
        SandboxedEscapeFormatter.__init__(self, env, escape=escape)
        self._budget = env.budget


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for every rendering."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rendering = threading.local()
        self.concat = self.joined  # type: ignore[method-assign]  # jinja2 joins all output by it
        self.globals["range"] = self._range
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(function, _FILTER_SIZES.get(name))
        self.filters["counted"] = self.counted

    def _bounded_filter(self, function: Callable[..., Any], size_of: SizeOf | None) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*arguments: Any, **options: Any) -> Any:
            if size_of is _joined_size:
                arguments = (*arguments[:first], _listed(arguments[first]), *arguments[first + 1 :])
            given = arguments[first:]
            budget = self.budget
            budget.step(1 + len(given[0]) if given and isinstance(given[0], (list, tuple)) else 1)
            read = sum(len(value) for value in (*given, *options.values()) if isinstance(value, str))
            budget.make(read + (size_of(*given, **options) if size_of is not None else 0))
            result = function(*arguments, **options)
            if isinstance(result, str):
                budget.make(len(result))
            return result

        return bounded

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering; unlimited while a template is compiled."""
        budget: Budget = getattr(self._rendering, "budget", _COMPILING)
        return budget

    @contextmanager
    def spending(self, budget: Budget) -> Iterator[None]:
        """Render within a budget, in this thread."""
        self._rendering.budget = budget
        try:
            yield
        finally:
            del self._rendering.budget

    def joined(self, parts: Iterable[Any]) -> str:
        """The parts as one text."""
        budget, texts, num_characters = self.budget, [], 0
        for part in parts:
            text = part if isinstance(part, str) else str(part)
            num_characters += len(text)
            if num_characters > budget.max_characters:
                budget.make(num_characters)
            texts.append(text)
        budget.make(num_characters)
        budget.step(len(texts))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation on two values."""
        self.budget.step()
        self.budget.make(_operation_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as jinja2 has it)
        """A call of a function or method."""
        budget = __self.budget
        budget.step()
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, (str, bytes)):
            if args and __obj.__name__ == "join":
                args = (_listed(args[0]),)
            budget.make(len(subject) + _method_size(subject, __obj.__name__, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What formats in place of a text's method ``format`` or ``format_map``; None for any other value."""
        if super().wrap_str_format(value) is None:
            return None
        form: str = value.__self__
        escape = getattr(form, "escape", None)  # of a text that was escaped

        def formatted(*arguments: Any, **options: Any) -> str:
            formatter = _Formatter(self) if escape is None else _EscapeFormatter(self, escape)
            if value.__name__ == "format_map":
                (options,), arguments = arguments, ()
            return type(form)(formatter.vformat(form, arguments, options))

        return formatted

    def _range(self, *limits: int) -> range:
        numbers = range(*limits)
        if len(numbers) > MAX_RANGE:
            raise TemplateLimitError(f"a range of the chat template has more than {MAX_RANGE} numbers")
        return numbers

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, each a step."""
        budget = self.budget
        for item in items:
            budget.step()
            yield item

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
        return super()._generate(source, *arguments, **options)


_COMPILING = Budget(max_characters=1 << 20, max_steps=1 << 62, max_cpu_s=float("inf"))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _listed(items: Any) -> Any:
    """The items as a sequence, so that they can be counted before they are joined."""
    return items if hasattr(items, "__len__") else list(items)


def _joined_size(value: Any, d: str = "", *_: Any, **__: Any) -> int:
    return len(str(d)) * len(value)


def _replaced_size(s: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return str(s).count(str(old)) * len(str(new))


def _indented_size(s: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    return (str(s).count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _padded_size(_: Any, width: int = 80) -> int:
    return width


def _dumped_size(_: Any, __: bool = False, indent: Any = None, *___: Any, **____: Any) -> int:
    if isinstance(indent, (int, str)) and (indent if isinstance(indent, int) else len(indent)) > _MAX_INDENT:
        raise TemplateLimitError(f"the chat template indents JSON by more than {_MAX_INDENT} characters")
    return 0


def _sliced_size(_: Any, number: int, *__: Any, **___: Any) -> int:
    return _ITEM_CHARACTERS * number


_FILTER_SIZES: dict[str, SizeOf] = {
    "batch": _sliced_size,
    "center": _padded_size,
    "format": lambda value, *_, **__: _formatted_size(str(value)),
    "indent": _indented_size,
    "join": _joined_size,
    "replace": _replaced_size,
    "slice": _sliced_size,
    "tojson": _dumped_size,
}
"""Filters whose output can be larger than their input, and how to compute that beforehand."""


def _method_size(subject: str | bytes, name: str, *arguments: Any, **options: Any) -> int:
    """Characters that a string method will make beyond those of the string itself."""
    first: Any = arguments[0] if arguments else next(iter(options.values()), None)
    if name == "replace" and len(arguments) >= 2:
        return _replaced_size(subject, arguments[0], arguments[1])
    if name == "join":
        return len(subject) * len(first)
    if name in _PADDING:
        return first if isinstance(first, int) else 0
    if name in _SPLITTING:
        text = subject if isinstance(subject, str) else subject.decode("latin-1")
        num_items = text.count(first) if isinstance(first, str) and first else len(text.split(None))
        return _ITEM_CHARACTERS * num_items
    if name == "expandtabs":
        return len(subject) * (first if isinstance(first, int) else 8)
    return 0


def _operation_size(operator: str, left: Any, right: Any) -> int:
    """Characters that an operation will make; for numbers, digits."""
    if operator == "*":
        return _repeated_size(left, right) if isinstance(right, int) else _repeated_size(right, left)
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) and right > 0 else 0
    if operator == "%":
        return _formatted_size(left) if isinstance(left, str) else 0
    return sum(_size(value) for value in (left, right))


def _repeated_size(value: Any, times: Any) -> int:
    return _size(value) * max(times, 0) if isinstance(times, int) else 0


def _formatted_size(form: str) -> int:
    widths = _FORMAT_WIDTH.findall(form)
    if "*" in widths:
        raise TemplateLimitError("the chat template formats with a width that it takes from a value")
    return len(form) + sum(map(int, widths))


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return _ITEM_CHARACTERS * len(value) if isinstance(value, (list, tuple)) else 0
