"""The program that reads grammars, in a process of its own: a few bytes can keep llguidance busy for ever, in code that
nothing but the end of its process stops.

Reads texts from its standard input and writes what is wrong with each, empty where nothing is, each behind its length
(4 bytes). It ends with its input, or by SIGXCPU with a text that takes longer than it may. It imports nothing of
Baton, so that it begins in 0.1 s.
"""

from __future__ import annotations

import math
import resource
import struct
import sys
import threading
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LENGTH = struct.Struct("<I")


def main() -> None:
    """``grammar_reader.py CPU_S STACK_BYTES``: how long a text may take, and the room for calls within each other."""
    cpu_s, stack_bytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=serve, args=(cpu_s,))
    thread.start()
    thread.join()


def serve(cpu_s: int) -> None:
    """Answer until the input ends."""
    texts, answers = sys.stdin.buffer, sys.stdout.buffer
    # Some costs show only when a grammar meets tokens. They hardly depend on which, and these are there at once.
    tokenizer = LLTokenizer("byte")
    while header := texts.read(LENGTH.size):
        text = texts.read(*LENGTH.unpack(header)).decode()
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard))
        problem = problem_of(text, tokenizer).encode()
        answers.write(LENGTH.pack(len(problem)) + problem)
        answers.flush()


def problem_of(text: str, tokenizer: LLTokenizer) -> str:
    """What is wrong with a grammar, apart from what it costs."""
    problem = str(LLMatcher.validate_grammar(text)).strip()
    if not problem:
        LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    return problem


if __name__ == "__main__":
    main()
