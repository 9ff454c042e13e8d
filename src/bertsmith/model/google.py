"""Google's layout: bert_config.json, bert_model.ckpt.index with .data files, vocab.txt. Into a model, and back.

google-research/bert writes it, from run_pretraining.py (or a release) to the classifiers of run_classifier.py and
run_squad.py. What an optimizer left in a checkpoint is passed over and counted. Google's bert_config.json may hold keys
of anybody's (its reader takes them all): under `bertsmith` stands what that layout has no place for, such as labels and
task, so that a folder comes back as it was.

Activation: a release of 2018 means the exact gelu (erf), which is what its "gelu" is read as, here as in transformers;
Google's later code computes the tanh approximation under the same name, which differs by up to 5e-4.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.names import from_google_name, google_name
from bertsmith.model.tensor_bundle import TensorBundle, read_bundle, write_bundle
from bertsmith.model.weights import (
    GOOGLE_CONFIG,
    LoadReport,
    check_size,
    load_weights,
    read_config_file,
    require_encoder,
)
from bertsmith.storage import write_text

CHECKPOINT = "bert_model.ckpt"
_MORE = "bertsmith"  # the key of bert_config.json for what Google's layout has no place for
# what modeling.py's BertConfig has
_GOOGLE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
)
# a slot stands below its variable (…/kernel/adam_m) or below the optimizer's scope (LAMB/…/kernel); whatever its
# spelling, these are how the names of optimizers and of their counters begin
_OPTIMIZER = re.compile(
    r"(?:^|/)_?(?:bert_?)?(?:adam|lamb(?!da)|lars|adagrad|adadelta|adafactor|rmsprop|momentum|ftrl|nesterov)[^/]*(?:/|$)",
    re.IGNORECASE,
)
_COUNTER = re.compile(
    r"(?:^|/)(?:global_step|beta_?[12]_power|(?:current_|dynamic_)?loss_scale|(?:num_)?(?:good|bad)_steps|"
    r"learning_rate|iterations?|decay)(?:_\d+)?$",
    re.IGNORECASE,
)


class GoogleCheckpoint:
    """The tensors of a checkpoint as a Source: under transformers' names and in their orientation, Google's where they
    have none. Optimizer slots and counters are not among them; `skipped` names these."""

    def __init__(self, bundle: TensorBundle) -> None:
        if any(name.startswith("_CHECKPOINTABLE_OBJECT_GRAPH") or "/.ATTRIBUTES/" in name for name in bundle):
            raise UserError(
                f"{bundle.prefix}: is an object-based checkpoint of TensorFlow 2, whose tensors have no names; save "
                "it as a name-based one, as TensorFlow 1 does"
            )
        self.path = Path(bundle.prefix)
        self._bundle = bundle
        self.skipped = [name for name in bundle if _is_optimizer_state(name, bundle)]
        kept = set(bundle).difference(self.skipped)
        self._places: dict[str, tuple[str, bool]] = {}  # name → name in the checkpoint, whether it is transposed
        for name in sorted(kept):
            found, transposed = from_google_name(name) or (name, False)
            other, _ = self._places.setdefault(found, (name, transposed))
            if other != name:
                raise UserError(f"{bundle.prefix}: {other} and {name} are two names of one tensor; save one of them")

    def names(self) -> list[str]:
        """All names."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, which is not read for it."""
        stored, transposed = self._places[name]
        shape = self._bundle[stored].shape
        return shape[::-1] if transposed else shape

    def get(self, name: str) -> Tensor:
        """A tensor, on the CPU, in the checkpoint's type. Raises UserError when it is damaged."""
        stored, transposed = self._places[name]
        array = self._bundle.tensor(stored)
        return torch.from_numpy(array.T if transposed else array)

    def file(self, name: str) -> Path:
        """What messages call the place of a tensor."""
        return self.path


def find_checkpoint(path: Path) -> Path | None:
    """The prefix of the checkpoint that `path` is: a folder that holds one, or the prefix itself; None for neither.

    Raises UserError for a folder with several, none of which is called bert_model.ckpt.
    """
    prefix = Path(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", str(path)))
    if Path(f"{prefix}.index").is_file():
        return prefix
    if not path.is_dir():
        return None
    found = sorted(file.with_suffix("") for file in path.glob("*.index"))
    if path / CHECKPOINT in found:
        return path / CHECKPOINT
    if len(found) > 1:
        names = ", ".join(prefix.name for prefix in found[:5])
        raise UserError(f"{path}: holds {len(found)} checkpoints; name one of them, such as {found[-1]} ({names})")
    return found[0] if found else None


def open_google(prefix: Path) -> tuple[BertConfig, GoogleCheckpoint, dict[str, Any]]:
    """The configuration beside a checkpoint, its tensors, and what a config.json would say beside the configuration.

    Raises UserError when a file is missing, broken, another architecture's, or they do not belong together.
    """
    path = prefix.parent / GOOGLE_CONFIG
    if not path.is_file():
        raise UserError(
            f"{prefix.parent}: no {GOOGLE_CONFIG} beside {prefix.name}; copy that of the model it was trained from"
        )
    values = read_config_file(path)
    more = values.get(_MORE, {})
    if not isinstance(more, dict):
        raise UserError(f"{path}: {_MORE} is no JSON object; remove it")
    try:
        config = BertConfig.from_dict(values | more)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    bundle = read_bundle(prefix)
    check_size(config, path, sum(entry.size for entry in bundle.values()))
    return config, GoogleCheckpoint(bundle), {key: value for key, value in more.items() if key not in config.to_dict()}


def load_google_model(prefix: Path) -> tuple[BertForPreTraining, LoadReport, dict[str, Any]]:
    """As `load_model`, from a checkpoint in Google's layout."""
    config, checkpoint, values = open_google(prefix)
    model = BertForPreTraining(config).initialize(0)
    report = load_weights(model, checkpoint)
    require_encoder(report, checkpoint.path)
    return model, report, values


def write_google(folder: Path, tensors: Mapping[str, Tensor], config: BertConfig, more: Mapping[str, Any]) -> None:
    """Write bert_config.json and bert_model.ckpt from float32 tensors under transformers' names.

    global_step is 0 and there are no optimizer slots, as in Google's releases. `more` is what config.json says beyond
    `config`.
    """
    values = {key: value for key, value in config.to_dict().items() if key in _GOOGLE_KEYS}
    rest = {key: value for key, value in config.to_dict().items() if key not in (*_GOOGLE_KEYS, "model_type")}
    if values["hidden_act"].startswith("gelu_"):  # the only one that modeling.py has is called gelu
        rest["hidden_act"], values["hidden_act"] = values["hidden_act"], "gelu"
    content = values | {_MORE: rest | dict(more)}
    write_text(folder / GOOGLE_CONFIG, json.dumps(content, indent=2, sort_keys=True) + "\n")
    arrays: dict[str, Any] = {"global_step": np.zeros((), np.int64)}
    for name, tensor in tensors.items():
        theirs, transposed = google_name(name)
        arrays[theirs] = tensor.numpy().T if transposed else tensor.numpy()
    write_bundle(folder / CHECKPOINT, arrays)


def _is_optimizer_state(name: str, names: Mapping[str, Any]) -> bool:
    """Whether a variable is none of the model's: an optimizer's slot or counter, in any spelling."""
    if _COUNTER.search(name) or _OPTIMIZER.search(name):
        return True
    above = name.rpartition("/")[0]  # what stands below another variable was made for it: /m and /v, /vr and /vc, …
    return above in names and from_google_name(above) is not None
