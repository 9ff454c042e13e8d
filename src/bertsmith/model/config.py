"""The architecture's numbers, under the key names of a Hugging Face `config.json`, and the published sizes.

Sizes: base and large from Devlin et al. 2018, section 3; tiny, mini, small and medium from Turc et al. 2019.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from bertsmith.errors import UserError

# name: (layers, hidden size); heads are hidden / 64 and the feed-forward size is 4 × hidden in every published model
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


@dataclass(frozen=True)
class BertConfig:
    """Shape of a BERT encoder. Raises UserError, all faults at once, when the numbers cannot make a model."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    bertsmith_trained_positions: int | None = None
    """How many of the positions, from the first on, pre-training came to; the others are random. None: all were."""

    def __post_init__(self) -> None:
        faults = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            expected = (int, float) if field.type in (float, "float") else (int,)
            if field.name == "hidden_act":
                if value not in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"):
                    faults.append(f"hidden_act: {value!r} is not known; use gelu, gelu_new or relu")
            elif isinstance(value, bool) or not isinstance(value, expected):
                faults.append(f"{field.name}: {value!r} is not a number of type {expected[-1].__name__}")
            elif field.name == "pad_token_id":
                if value < 0:
                    faults.append(f"pad_token_id: {value} is negative")
            elif field.name.endswith("_prob"):
                if not 0 <= value < 1:
                    faults.append(f"{field.name}: {value} is not in [0, 1)")
            elif value <= 0:
                faults.append(f"{field.name}: {value} is not positive")
            elif field.name == "bertsmith_trained_positions" and not faults and value > self.max_position_embeddings:
                faults.append(f"{field.name}: {value} is more than max_position_embeddings")
        if not faults and self.hidden_size % self.num_attention_heads:
            faults.append(
                f"hidden_size: {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if faults:
            raise UserError("model configuration: " + "; ".join(faults))

    @classmethod
    def of_size(cls, size: str, vocab_size: int = 30522, **changes: Any) -> "BertConfig":
        """The published model called `size` (one of SIZES); `changes` override single numbers."""
        if size not in SIZES:
            raise UserError(f"model: {size!r} is not a published size; use one of {', '.join(SIZES)} or a model folder")
        layers, hidden = SIZES[size]
        shape: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "intermediate_size": 4 * hidden,
        }
        return cls(**(shape | changes))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "BertConfig":
        """From a parsed `config.json`; keys that do not shape a BERT encoder are left alone."""
        model_type = values.get("model_type", "bert")
        if model_type != "bert":
            raise UserError(f"model_type is {model_type!r}; only 'bert' can be opened")
        if values.get("position_embedding_type", "absolute") != "absolute":
            raise UserError("position_embedding_type is not 'absolute'; only learned positions are known")
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known and value is not None})

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` holds, with `model_type` for transformers."""
        return {"model_type": "bert", **{key: value for key, value in asdict(self).items() if value is not None}}

    @property
    def trained_positions(self) -> int:
        """The longest sequence of which no position is random."""
        return self.bertsmith_trained_positions or self.max_position_embeddings


def useful_flops(config: BertConfig, tokens: int, squared_lengths: int, masked: int, sequences: int) -> float:
    """Arithmetic a training step cannot do without: matrix products forward, twice as much backward.

    Encoder layers over `tokens` real tokens (the last one's output product and feed-forward only where a head looks),
    attention over each sequence (`squared_lengths` = Σ length²), the MLM head on `masked` positions, pooler and NSP
    head on `sequences` (0: not trained). Multiply and add count as two.
    """
    hidden = config.hidden_size
    head = masked * 2 * hidden * (hidden + config.vocab_size)
    pooler = sequences * 2 * hidden * (hidden + 2)
    return encoder_flops(config, tokens, squared_lengths, masked + sequences) + 3.0 * (head + pooler)


def encoder_flops(config: BertConfig, tokens: int, squared_lengths: int, rows: int) -> float:
    """The encoder's part of a training step (forward and backward); its last layer is wanted at `rows` tokens only."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    every_token = layers * 3 * hidden * hidden + (layers - 1) * (
        hidden * hidden + 2 * hidden * config.intermediate_size
    )
    last_rows = hidden * hidden + 2 * hidden * config.intermediate_size
    products = 2 * (tokens * every_token + rows * last_rows)
    return 3.0 * (products + layers * squared_lengths * 4 * hidden)
