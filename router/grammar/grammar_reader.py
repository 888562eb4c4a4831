"""The program that validates grammars, in a process of its own: a few bytes can keep llguidance busy forever, in code
that only the end of its process can stop.

It reads texts from standard input, and writes for each what is wrong with it, or an empty answer. Texts and answers are
prefixed by their length (4 bytes). The program ends with its input, or by SIGXCPU if a text takes too long. It imports
nothing of Baton, so that it starts in 0.1 s.
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
    """``grammar_reader.py CPU_S STACK_BYTES``: the CPU time for one text, and the size of the stack."""
    cpu_s, stack_bytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=serve, args=(cpu_s,))
    thread.start()
    thread.join()


def serve(cpu_s: int) -> None:
    """Answer until the input ends."""
    texts, answers = sys.stdin.buffer, sys.stdout.buffer
    # Some costs show only when a grammar is used with tokens. Which tokens hardly matters, and these need no loading.
    tokenizer = LLTokenizer("byte")
    while header := texts.read(LENGTH.size):
        text = texts.read(*LENGTH.unpack(header)).decode()
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard))
        problem = problem_of(text, tokenizer).encode()
        answers.write(LENGTH.pack(len(problem)) + problem)
        answers.flush()


def problem_of(text: str, tokenizer: LLTokenizer) -> str:
    """What is wrong with a grammar; its cost is not judged here."""
    problem = str(LLMatcher.validate_grammar(text)).strip()
    if not problem:
        LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    return problem


if __name__ == "__main__":
    main()
