"""The text that `bertsmith demo` runs on: public-domain prose, English and some Chinese, a document a chapter.

Where each book comes from, why it is free and what was cut stands in PROVENANCE.md beside the files.
"""

import importlib.resources


def demo_text_paths() -> list[str]:
    """The JSON-lines files (gzip), `text` column; readable by `read_documents` as they are."""
    folder = importlib.resources.files(__name__)
    return sorted(str(file) for file in folder.iterdir() if file.name.endswith(".jsonl.gz"))
