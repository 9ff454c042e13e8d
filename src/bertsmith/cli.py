"""The program: `bertsmith COMMAND …` from arguments to exit code. The commands themselves stand in commands.py.

Exit codes: 0 done; 2 the user's input or options are wrong (one sentence on stderr); 1 a fault of ours (a traceback);
130 stopped.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from bertsmith import __version__
from bertsmith.arguments import CommandParser, add_json
from bertsmith.commands import COMMANDS
from bertsmith.errors import ToldElsewhere, UserError, why_out_of_memory
from bertsmith.options import did_you_mean
from bertsmith.progress import say
from bertsmith.rank import describe_rank, own_rank, world_size
from bertsmith.results import print_json, print_text, use_utf8
from bertsmith.signals import sigterm_as

_SECONDS_FOR_THE_FIRST = 1.5


def overview() -> str:
    """What `bertsmith --help` prints."""
    lines = "\n".join(f"  {name:<16}{command.summary}" for name, command in COMMANDS.items())
    return f"""usage: bertsmith COMMAND ...

BERT from raw text to a pre-trained model.

commands:
{lines}

  bertsmith COMMAND --help   what a command takes, with examples
  bertsmith --version

the usual way:
  bertsmith vocab texts/ --out vocab
  bertsmith prepare texts/ --tokenizer vocab --out corpus
  bertsmith pretrain --data corpus --out run --model mini --minutes 30
  bertsmith fill run/model "The capital of France is [MASK]."

exit codes: 0 done; 2 the input or the options are wrong; 130 interrupted; 1 a fault of bertsmith"""


def bench_overview() -> str:
    """What `bertsmith bench --help` prints."""
    lines = "\n".join(f"  {name:<16}{COMMANDS[name].summary}" for name in COMMANDS if name.startswith("bench "))
    return f"usage: bertsmith bench pretrain|finetune|embed|prepare ... (default pretrain)\n\n{lines}"


def find_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command that `argv` names and what follows it. `bench` alone, or with options, is `bench pretrain`."""
    name, rest = argv[0], list(argv[1:])
    if name == "bench":
        name, rest = (
            (f"bench {rest[0]}", rest[1:]) if rest and not rest[0].startswith("-") else ("bench pretrain", rest)
        )
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UserError(
            f"{name!r} is no {kind}{did_you_mean(name, [*COMMANDS, '--help', '--version'])} (see `bertsmith --help`)"
        )
    return name, rest


def run(argv: Sequence[str]) -> None:
    """Run one command and print its result."""
    if len(argv) > 1 and argv[0] == "help":
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print_text(overview())
        return
    if argv[0] in ("-V", "--version"):
        print_text(f"bertsmith {__version__}")
        return
    if argv[0] == "bench" and argv[1:2] in (["-h"], ["--help"]):
        print_text(bench_overview())
        return
    name, rest = find_command(argv)
    command = COMMANDS[name]
    if world_size() > 1 and not command.several_processes:
        raise UserError(
            f"{name} runs in one process and was started in {world_size()} (RANK and WORLD_SIZE are set); start it "
            "without torchrun"
        )
    parser = CommandParser(name, command.summary, command.details, command.examples, command.usage)
    command.add(parser)
    add_json(parser)
    args, pairs = parser.parse(rest)
    if args.json and sys.__stdout__ is None:
        raise UserError("--json: stdout is closed, so that the result would be lost; send it to a file or a pipe")
    if getattr(args, "out", None) is not None:
        from bertsmith.storage import check_out
        from bertsmith.text.streams import is_url

        if own_rank():
            pass  # the first of the processes writes
        elif not is_url(args.out):
            check_out(Path(args.out), folder=True)
        elif not command.remote_out:
            raise UserError(f"--out {args.out}: {name} writes to folders of this machine only; give a plain path")
    summary = command.run(args, pairs)
    if own_rank():
        return  # the first of the processes prints
    if args.json:
        print_json(summary)
    else:
        command.show(summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    code = _main(argv)
    if code and argv is None and world_size() > 1:
        # the interpreter's own end would take down connections to processes that may be gone, and can wait for ever
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    use_utf8()
    try:
        with _stopping_at_sigterm():
            run(list(sys.argv[1:] if argv is None else argv))
        return 0
    except SystemExit as finished:  # argparse, after --help
        return int(finished.code or 0)
    except ToldElsewhere:
        return 2
    except UserError as error:
        _tell(str(error))
        return 2
    except KeyboardInterrupt:
        if argv is None:  # the program ends here: a second Ctrl-C while the interpreter closes says nothing new
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not own_rank():
            say("bertsmith: interrupted")
        return 130
    except Exception as error:
        if reason := _why_not_ours(error):
            _tell(reason)
            return 2
        say(traceback.format_exc().rstrip())
        if own_rank():
            say(f"bertsmith: this was {describe_rank()}")
        say("bertsmith: this is a fault of bertsmith, not of yours; please report it with the lines above")
        return 1


def _tell(message: str) -> None:
    """Tell the user what went wrong, once."""
    if own_rank():
        # what is wrong with the command is so for all of its processes: torchrun ends this one when the first has told
        time.sleep(_SECONDS_FOR_THE_FIRST)
        message = f"{describe_rank()}: {message}"
    say(f"bertsmith: {message}")


def _why_not_ours(error: Exception) -> str | None:
    """What the user can do about an error that no room of the house expected; None where it is ours to mend."""
    if reason := why_out_of_memory(error):
        return reason
    if isinstance(error, PermissionError):
        return f"{error.filename}: permission denied" if error.filename else str(error)
    if isinstance(error, OSError) and not isinstance(error, FileExistsError | NotADirectoryError):
        from bertsmith.storage import why_refused

        if reason := why_refused(error):
            return f"{error.filename}: {reason}" if error.filename else reason
    return None


@contextlib.contextmanager
def _stopping_at_sigterm() -> Iterator[None]:
    """SIGTERM (a batch system, a closing container) ends a command as Ctrl-C does: cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with sigterm_as(stop):
        yield
