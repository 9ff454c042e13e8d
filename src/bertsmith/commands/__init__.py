"""The commands, in the order that `bertsmith --help` lists them. cli.py is the program around them.

Nothing heavy is imported until a command runs.
"""

from bertsmith.commands import bench, checkpoints, corpus, inference, pretraining, tasks
from bertsmith.commands.command import Command

_ORDER = (
    *("vocab", "prepare", "pretrain", "fill", "finetune", "glue", "evaluate", "predict", "embed", "score"),
    *("convert", "export", "info", "demo", "bench pretrain", "bench finetune", "bench embed", "bench prepare"),
)
_ALL = (
    corpus.COMMANDS | pretraining.COMMANDS | inference.COMMANDS | tasks.COMMANDS | checkpoints.COMMANDS | bench.COMMANDS
)
COMMANDS: dict[str, Command] = {name: _ALL[name] for name in _ORDER}
assert len(COMMANDS) == len(_ALL), "a command is missing from the order"

__all__ = ["COMMANDS", "Command"]
