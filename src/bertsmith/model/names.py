"""What tensors are called: ours, transformers' and Google's, as one table that is read in every direction.

transformers' names stand in the middle. Ours differ in that query, key and value are one matrix; Google's in that
dense matrices are stored transposed and layer norms have gamma and beta. google-research/bert, modeling.py,
run_pretraining.py, run_classifier.py and run_squad.py.
"""

import re
from functools import cache

WORD_TABLE = "bert.embeddings.word_embeddings.weight"
MLM_BIAS = "cls.predictions.bias"
DECODER, DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
CLASSIFIER, SPANS = "classifier.weight", "qa_outputs.weight"

# parts of a model → how transformers' names of their tensors begin
PARTS = {
    "encoder": ("bert.embeddings.", "bert.encoder."),
    "pooler": ("bert.pooler.",),
    "mlm": ("cls.predictions.",),
    "nsp": ("cls.seq_relationship.",),
    "output": ("classifier.", "qa_outputs."),
}

# ours → transformers', outside the layers
_NAMES = {
    "bert.embeddings.word": WORD_TABLE,
    "bert.embeddings.position": "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
    "bert.embeddings.norm": "bert.embeddings.LayerNorm",
    "bert.pooler.dense": "bert.pooler.dense",
    "mlm_head.transform": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
    "mlm_head.bias": MLM_BIAS,
    "nsp_head.linear": "cls.seq_relationship",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}
# ours → transformers', after "bert.encoder.layer.N."
_LAYER_NAMES = {
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
_JOINED = tuple(f"attention.self.{which}" for which in ("query", "key", "value"))
# transformers' → Google's, where it is more than a change of spelling; none of these is stored transposed
_GOOGLE_NAMES = {
    WORD_TABLE: "bert/embeddings/word_embeddings",
    "bert.embeddings.position_embeddings.weight": "bert/embeddings/position_embeddings",
    "bert.embeddings.token_type_embeddings.weight": "bert/embeddings/token_type_embeddings",
    MLM_BIAS: "cls/predictions/output_bias",
    "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    CLASSIFIER: "output_weights",  # run_classifier.py has no scope for them
    "classifier.bias": "output_bias",
    SPANS: "cls/squad/output_weights",
    "qa_outputs.bias": "cls/squad/output_bias",
}
_NUMBER = r"(0|[1-9]\d*)"


def hugging_face_names(name: str) -> list[str]:
    """The names transformers gives to our parameter `name`: one, or three for a joined query/key/value."""
    if name in _NAMES:
        return [_NAMES[name]]
    stem, _, leaf = name.rpartition(".")
    if stem in _NAMES:
        return [f"{_NAMES[stem]}.{leaf}"]
    encoder, _, rest = stem.partition("layer.")
    number, _, part = rest.partition(".")
    parts = _JOINED if part == "qkv" else (_LAYER_NAMES[part],)
    return [f"{encoder}layer.{number}.{part}.{leaf}" for part in parts]


def is_part(name: str, *parts: str) -> bool:
    """Whether the tensor that transformers calls `name` belongs to one of `parts` (keys of PARTS)."""
    return any(name.startswith(prefix) for part in parts for prefix in PARTS[part])


def modern_name(name: str) -> str:
    """A name in a PyTorch file of any age as transformers writes it today.

    gamma/beta of old layer norms (nothing else's: a classifier may have a gamma of its own) are renamed, a bare encoder
    and one saved from within DataParallel get the prefix that others have.
    """
    name = name.removeprefix("module.")
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(f".{old}"):
            name = name.removesuffix(old) + new
    return name


def google_name(name: str) -> tuple[str, bool]:
    """Google's name for the tensor that transformers calls `name`, and whether it is stored transposed.

    Raises KeyError for a tensor that BERT does not have.
    """
    number = re.search(rf"\.layer\.{_NUMBER}\.", name)
    if number is None:
        return _google_table()[name]
    theirs, transposed = _google_table()[name.replace(number[0], ".layer.N.", 1)]
    return theirs.replace("layer_N", f"layer_{number[1]}"), transposed


def from_google_name(name: str) -> tuple[str, bool] | None:
    """transformers' name for the tensor that Google calls `name`, and whether it is stored transposed; None for what is
    none of BERT's. `module/`, the scope of TensorFlow Hub, is passed over."""
    name = name.removeprefix("module/")
    number = re.search(rf"/layer_{_NUMBER}/", name)
    found = _from_google_table().get(name.replace(number[0], "/layer_N/", 1) if number else name)
    if found is None or number is None:
        return found
    return found[0].replace("layer.N", f"layer.{number[1]}"), found[1]


@cache
def _google_table() -> dict[str, tuple[str, bool]]:
    """transformers' names (N for a layer's number) → Google's, and whether the matrix is stored transposed."""
    stems = [name for name in _NAMES.values() if name not in _GOOGLE_NAMES and f"{name}.weight" not in _GOOGLE_NAMES]
    stems += [f"bert.encoder.layer.N.{part}" for part in (*_JOINED, *_LAYER_NAMES.values())]
    table = {name: (theirs, False) for name, theirs in _GOOGLE_NAMES.items()}
    for stem in stems:
        scope = stem.replace(".layer.N.", ".layer_N.").replace(".", "/")
        leaves = ("gamma", "beta") if stem.endswith("LayerNorm") else ("kernel", "bias")
        table[f"{stem}.weight"] = (f"{scope}/{leaves[0]}", leaves[0] == "kernel")
        table[f"{stem}.bias"] = (f"{scope}/{leaves[1]}", False)
    return table


@cache
def _from_google_table() -> dict[str, tuple[str, bool]]:
    return {theirs: (name, transposed) for name, (theirs, transposed) in _google_table().items()}
