"""What the demo fine-tunes on: sentences from film reviews, negative or positive, a training and a dev file.

Source, licence and selection stand in PROVENANCE.md beside the files.
"""

import importlib.resources


def demo_review_path(part: str) -> str:
    """The .tsv.gz file of `train` or `dev`: columns `text` and `label`."""
    return str(importlib.resources.files(__name__) / f"{part}.tsv.gz")
