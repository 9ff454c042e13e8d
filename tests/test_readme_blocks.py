"""The reader of README commands finds every sh block, makes it smaller only as told, and refuses stale comments."""

import pytest

from readme_commands import Block, read_blocks

README = """# Title

```sh
make demo
```

Some words.

<!-- ci: --minutes 30 => --steps 20 -->
<!-- ci: my_texts => texts -->
```sh
bertsmith vocab my_texts --out tokenizer
bertsmith pretrain \\
  --minutes 30 --out run
```

```text
not a command
```

<!-- ci: skip: needs four GPUs -->
```sh
torchrun --nproc-per-node 4 -m bertsmith pretrain
```
"""


def test_blocks_are_found_and_made_smaller() -> None:
    assert read_blocks(README) == [
        Block(3, "make demo"),
        Block(11, "bertsmith vocab texts --out tokenizer\nbertsmith pretrain \\\n  --steps 20 --out run"),
        Block(22, "torchrun --nproc-per-node 4 -m bertsmith pretrain", "needs four GPUs"),
    ]


@pytest.mark.parametrize(
    ("markdown", "message"),
    [
        ("<!-- ci: --steps 9 => --steps 2 -->\n```sh\nbertsmith demo\n```\n", "'--steps 9' does not occur"),
        ("<!-- ci: smaller -->\n```sh\nbertsmith demo\n```\n", "is neither 'OLD => NEW' nor 'skip: REASON'"),
        ("<!-- ci: bertsmith demo => -->\n```sh\nbertsmith demo\n```\n", "is neither"),
        ("<!-- ci: a => b -->\n\n```sh\na\n```\n", "must stand right before"),
        ("<!-- ci: a => b -->\n```text\na\n```\n", "not sh"),
        ("<!-- ci: a => b -->\n", "end of the file"),
        ("```sh\nbertsmith demo\n", "not closed"),
    ],
)
def test_stale_or_misplaced_comments_are_refused(markdown: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_blocks(markdown)
