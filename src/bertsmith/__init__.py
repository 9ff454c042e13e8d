"""bertsmith: the whole of BERT in one package, from raw text to a pre-trained, measured encoder.

The functions behind the commands, imported when first used (so that `import bertsmith` stays quick):

    build_vocabulary(inputs, out, size=30_000)           → tokenizer folder
    load_tokenizer(folder)                               → BertTokenizer
    prepare_corpus(inputs, tokenizer, out)               → corpus folder
    open_corpus(folder)                                  → TokenCorpus
    load_settings(PretrainSettings, recipe, overrides)   → settings; load_recipe(name) for the recipe
    pretrain(settings, out)                              → run folder with the finished model
    load_model(folder)                                   → BertForPreTraining, what was found in its file, config.json
    fill_masks(folder, texts)                            → tokens and probabilities for each [MASK]
    load(folder)                                         → a model loaded once: embeds, fills, scores, predicts
    load_exported(folder)                                → an exported file: padded batches of ids in, arrays out

What the user can mend is raised as UserError; its text is the whole message.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.corpus.prepare import prepare_corpus
    from bertsmith.corpus.shards import open_corpus
    from bertsmith.errors import UserError
    from bertsmith.inference.exported import load_exported
    from bertsmith.inference.fill import fill_masks
    from bertsmith.inference.loaded import load
    from bertsmith.model.bert import BertForPreTraining
    from bertsmith.model.config import BertConfig
    from bertsmith.model.weights import load_model
    from bertsmith.options import load_recipe, load_settings
    from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer
    from bertsmith.text.vocabulary import build_vocabulary
    from bertsmith.training.loop import pretrain
    from bertsmith.training.settings import PretrainSettings

__version__ = "0.1.0"

_HOMES = {
    "BertConfig": "model.config",
    "BertForPreTraining": "model.bert",
    "BertTokenizer": "text.tokenizer",
    "PretrainSettings": "training.settings",
    "UserError": "errors",
    "build_vocabulary": "text.vocabulary",
    "fill_masks": "inference.fill",
    "load": "inference.loaded",
    "load_exported": "inference.exported",
    "load_model": "model.weights",
    "load_recipe": "options",
    "load_settings": "options",
    "load_tokenizer": "text.tokenizer",
    "open_corpus": "corpus.shards",
    "prepare_corpus": "corpus.prepare",
    "pretrain": "training.loop",
}
__all__ = [
    "BertConfig",
    "BertForPreTraining",
    "BertTokenizer",
    "PretrainSettings",
    "UserError",
    "__version__",
    "build_vocabulary",
    "fill_masks",
    "load",
    "load_exported",
    "load_model",
    "load_recipe",
    "load_settings",
    "load_tokenizer",
    "open_corpus",
    "prepare_corpus",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bertsmith.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
