"""Command line: ``python -m scripts.train_tiny train``, ``export`` or ``card``."""

import argparse
import logging
from pathlib import Path

from benchmarks.arguments import count, positive

from .card import write_card
from .conversation import tokenizer_corpus
from .export import WEIGHTS_NAME, export
from .model import ModelConfig
from .schedule import Schedule
from .tokenizer import TOKENIZER_NAME, load_tokenizer, train_tokenizer
from .train import CHECKPOINT_NAME, OtherRunError, TrainConfig, Trainer, second_training

DEFAULT_NUM_STEPS = 10000
DEFAULT_NUM_SECOND_STEPS = 2000
_NUM_TOKENIZER_CHATS = 4000
_MODEL_DIRECTORY = Path(__file__).parents[2] / "engine" / "builtin_model"


def _train(args: argparse.Namespace) -> None:
    directory: Path = args.out
    directory.mkdir(parents=True, exist_ok=True)
    start: Path | None = None
    if args.start is not None:
        start = args.start / WEIGHTS_NAME
        if not start.is_file():
            raise SystemExit(f"--from {args.start}: there is no {start}; name the folder of an exported model")
        load_tokenizer(args.start).save(str(directory / TOKENIZER_NAME))
    elif not (directory / TOKENIZER_NAME).exists():
        tokenizer = train_tokenizer(tokenizer_corpus(args.seed, _NUM_TOKENIZER_CHATS))
        tokenizer.save(str(directory / TOKENIZER_NAME))
    num_steps = args.steps or (DEFAULT_NUM_STEPS if start is None else DEFAULT_NUM_SECOND_STEPS)
    schedule = Schedule(num_steps=num_steps, max_minutes=args.max_minutes)
    config = TrainConfig(schedule=schedule, seed=args.seed, num_threads=args.threads, compile=not args.no_compile)
    if start is not None:
        config = second_training(config)
    try:
        Trainer(config, ModelConfig(), load_tokenizer(directory), directory, start).run()
    except OtherRunError as error:
        raise SystemExit(str(error)) from error


def _export(args: argparse.Namespace) -> None:
    checkpoint: Path = args.run / CHECKPOINT_NAME
    if not checkpoint.is_file():
        raise SystemExit(f"there is no {checkpoint}: training writes it every few minutes, and at its end")
    export(checkpoint, args.run, args.model)


def _card(args: argparse.Namespace) -> None:
    write_card(args.model, args.rows, args.stories, training=args.training, remarks=args.remarks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_tiny", description=__doc__)
    commands = parser.add_subparsers(required=True)

    train = commands.add_parser("train", help="train the tokenizer and the model; resumes from its checkpoint")
    train.add_argument("--out", type=Path, required=True, help="folder for the tokenizer and the checkpoint")
    train.add_argument(
        "--from",
        type=Path,
        dest="start",
        metavar="MODEL",
        help="teach this exported model tools and schemas",
    )
    train.add_argument("--steps", type=count, help=f"{DEFAULT_NUM_STEPS}; with --from {DEFAULT_NUM_SECOND_STEPS}")
    train.add_argument("--max-minutes", type=positive, help="end the schedule after this time if steps are slow")
    train.add_argument("--seed", type=int, default=1)
    train.add_argument("--threads", type=count, default=2)
    train.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    train.set_defaults(command=_train)

    export_ = commands.add_parser("export", help="write the checkpoint as a Hugging Face directory")
    export_.add_argument("--run", type=Path, required=True, help="folder given as --out to train")
    export_.add_argument("--model", type=Path, default=_MODEL_DIRECTORY)
    export_.set_defaults(command=_export)

    card = commands.add_parser("card", help="write the model card from the benchmark's figures and stories")
    card.add_argument("--model", type=Path, default=_MODEL_DIRECTORY)
    card.add_argument("--rows", type=Path, required=True, help="file written by --json of benchmarks.tiny_model")
    card.add_argument("--stories", type=Path, required=True, help="file written by --stories of benchmarks.tiny_model")
    card.add_argument("--training", required=True, help="sentence about the training: steps, time, machine")
    card.add_argument("--remarks", default="", help="remarks about results below their goal")
    card.set_defaults(command=_card)
    return parser


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    args = _parser().parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
