"""BERT as published: post-layer-norm Transformer encoder over packed batches, pooler, and the pre-training model.

A batch is packed: no padding. T tokens of N sequences lie end to end; `sequence_starts` (N+1,) says where each begins.
H hidden size, V vocabulary, M masked positions. Devlin et al. 2018, sections 3 and A.2; google-research/bert,
modeling.py.
"""

import hashlib
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.attention import Plan, attend, plan_attention
from bertsmith.model.config import BertConfig
from bertsmith.model.dropout import DropoutMasks, drop, drop_and_add
from bertsmith.model.heads import (
    MaskedLanguageModelHead,
    NextSentenceHead,
    linear_cross_entropy,
    logits_in_parts,
)
from bertsmith.model.layers import LayerNorm, Linear, TiedGradient, activation, fill_up, look_up_words


class BertEmbeddings(nn.Module):
    """Word + learned position + segment embeddings, layer norm, dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.position = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        self.segment = nn.Parameter(torch.empty(config.type_vocab_size, config.hidden_size))
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = config.hidden_dropout_prob

    def forward(
        self,
        token_ids: Tensor,  # (T,)
        segment_ids: Tensor,  # (T,)
        position_ids: Tensor,  # (T,)
        dtype: torch.dtype,
        masks: DropoutMasks | None,
        tied: TiedGradient | None = None,
    ) -> Tensor:
        """→ hidden (T, H) in `dtype`."""
        total = look_up_words(self.word, token_ids, tied)
        total = total + F.embedding(position_ids, self.position) + F.embedding(segment_ids, self.segment)
        return self.finish(total, dtype, masks)

    def finish(self, total: Tensor, dtype: torch.dtype, masks: DropoutMasks | None) -> Tensor:
        """Norm and dropout of the sum (T, H), from here on in `dtype`."""
        return drop(self.norm(total.to(dtype)), self.dropout, masks)


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each followed by dropout, residual and layer norm (post-norm)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)  # query, key, value in one product
        self.attention_output = Linear(config.hidden_size, config.hidden_size)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.intermediate = Linear(config.hidden_size, config.intermediate_size)
        self.output = Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.activation = activation(config.hidden_act)
        self.heads = config.num_attention_heads
        self.dropout = config.hidden_dropout_prob
        self.attention_dropout = config.attention_probs_dropout_prob

    def forward(self, hidden: Tensor, plan: Plan, masks: DropoutMasks | None, rows: Tensor | None = None) -> Tensor:
        """(T, H) → (T, H), or (R, H) when only the tokens `rows` (R,) are wanted."""
        context = attend(self.qkv(hidden), plan, self.heads, self.attention_dropout, masks)
        if rows is not None:  # each token attends to all, but what follows is a matter of each token alone
            context, hidden = context.index_select(0, rows), hidden.index_select(0, rows)
        mixed = drop_and_add(hidden, self.attention_output(context), self.dropout, masks)
        hidden = self.attention_norm(mixed)
        expanded = self.activation(self.intermediate(hidden))  # (T, 4H)
        return self.output_norm(drop_and_add(hidden, self.output(expanded), self.dropout, masks))


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self, hidden: Tensor, plan: Plan, masks: DropoutMasks | None, rows: Tensor | None = None
    ) -> list[Tensor]:
        """→ hidden states of every level, embeddings first: layers + 1 tensors (T, H); the last (R, H) with `rows`."""
        states = [hidden]
        for number, layer in enumerate(self.layer, 1):
            states.append(layer(states[-1], plan, masks, rows if number == len(self.layer) else None))
        return states


class BertPooler(nn.Module):
    """tanh(dense([CLS])), the vector of a whole sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, cls_hidden: Tensor) -> Tensor:
        """Last hidden states of the [CLS] tokens (N, H) → (N, H)."""
        return torch.tanh(self.dense(cls_hidden))


class BertModel(nn.Module):
    """Embeddings, encoder and pooler. `compute_dtype` is the type of all arithmetic after the embedding sum.

    `pooled` False: without the pooler, for heads that look at tokens only; it then hands [CLS] on as it is.
    """

    def __init__(self, config: BertConfig, pooled: bool = True) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler: nn.Module = BertPooler(config) if pooled else nn.Identity()

    def hidden_states(
        self,
        token_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        sequence_starts: Tensor,
        masks: DropoutMasks | None = None,
        tied: TiedGradient | None = None,
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """Packed ids, each (T,), and `sequence_starts` (N+1,) → hidden states of every level, each (T, H).

        `rows` (R,): the tokens wanted of the last level, which then is (R, H) in that order; the last layer's output
        product and feed-forward, two thirds of its arithmetic and more, are then computed for these alone.
        """
        plan = plan_attention(sequence_starts)
        return self.planned_states(token_ids, segment_ids, position_ids, plan, masks, tied, rows)

    def planned_states(
        self,
        token_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        plan: Plan,
        masks: DropoutMasks | None = None,
        tied: TiedGradient | None = None,
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """As `hidden_states`, of a batch whose sequences are planned already (a VarlenPlan's rows are filled up)."""
        packed = (fill_up(ids) for ids in (token_ids, segment_ids, position_ids))
        hidden = self.embeddings(*packed, self.compute_dtype, masks, tied)
        chosen = None if rows is None else fill_up(rows)
        states = self.encoder(hidden, plan, masks, chosen)
        last = states.pop()[: len(token_ids) if rows is None else len(rows)]
        return [*(state[: len(token_ids)] for state in states), last]

    def forward(
        self,
        token_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        sequence_starts: Tensor,
        masks: DropoutMasks | None = None,
        tied: TiedGradient | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """→ last hidden states, (T, H), or (R, H) of the tokens `rows`."""
        return self.hidden_states(token_ids, segment_ids, position_ids, sequence_starts, masks, tied, rows)[-1]


@torch.no_grad()
def initialize_parameters(model: nn.Module, deviation: float, seed: int, names: Container[str] | None = None) -> None:
    """Truncated normal (cut at two standard deviations) for matrices, zeros for biases, ones for norms.

    What a parameter is given is a function of (seed, name) alone. `names`: those to be drawn; None: all.
    """
    for name, parameter in model.named_parameters():
        if names is not None and name not in names:
            continue
        if parameter.ndim == 2:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            source = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            nn.init.trunc_normal_(parameter, std=deviation, a=-2 * deviation, b=2 * deviation, generator=source)
        elif name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.zero_()


@dataclass
class PretrainingLoss:
    """`total` is what backward() starts from; the parts are for the log (float32 scalars on the device)."""

    total: Tensor
    mlm: Tensor
    nsp: Tensor | None


@dataclass
class PretrainingCounts:
    """Evaluation sums over one batch (float64-safe on the host): losses in nats and right answers."""

    mlm_loss: float
    mlm_correct: int
    mlm_targets: int
    nsp_loss: float
    nsp_correct: int
    nsp_targets: int


class BertForPreTraining(nn.Module):
    """BERT with the masked-language-model head and the next-sentence head.

    `next_sentence` False leaves the pooler and its head out of loss and gradients (they stay in the saved folder).
    """

    def __init__(self, config: BertConfig, next_sentence: bool = True) -> None:
        super().__init__()
        self.config = config
        self.next_sentence = next_sentence
        self.bert = BertModel(config)
        self.mlm_head = MaskedLanguageModelHead(config)
        self.nsp_head = NextSentenceHead(config)
        if not next_sentence:
            for parameter in (*self.bert.pooler.parameters(), *self.nsp_head.parameters()):
                parameter.requires_grad_(False)

    def initialize(self, seed: int) -> "BertForPreTraining":
        """See `initialize_parameters`."""
        initialize_parameters(self, self.config.initializer_range, seed)
        return self

    def forward(
        self,
        token_ids: Tensor,  # (T,)
        segment_ids: Tensor,  # (T,)
        position_ids: Tensor,  # (T,)
        sequence_starts: Tensor,  # (N+1,)
        masked_positions: Tensor,  # (M,)
        masked_labels: Tensor,  # (M,)
        next_sentence_labels: Tensor | None,  # (N,)
        mlm_scale: float,
        nsp_scale: float,
        masks: DropoutMasks | None = None,
        plan: Plan | None = None,
    ) -> PretrainingLoss:
        """Loss = mlm_scale · Σ MLM + nsp_scale · Σ NSP; a scale is 1 / targets of the whole optimizer step.

        `plan`: of the sequences, where the caller has it. Ids, starts and positions may be more than the labels are
        of: what is filled up counts for nothing.
        """
        tied = TiedGradient()
        packed = (token_ids, segment_ids, position_ids, sequence_starts)
        pairs = self._pairs(next_sentence_labels)
        masked, cls = self._wanted_hidden(packed, masked_positions, pairs, masks, tied, plan)
        transformed = self.mlm_head(masked)  # (M or more, H)
        mlm = linear_cross_entropy(
            transformed, self.bert.embeddings.word, self.mlm_head.bias, masked_labels, mlm_scale, tied
        )
        if cls is None or next_sentence_labels is None:
            return PretrainingLoss(mlm, mlm.detach(), None)
        logits = self.nsp_head(self.bert.pooler(cls)).float()  # (N, 2)
        nsp = F.cross_entropy(logits, next_sentence_labels, reduction="sum") * nsp_scale
        return PretrainingLoss(mlm + nsp, mlm.detach(), nsp.detach())

    def _wanted_hidden(
        self,
        packed: tuple[Tensor, Tensor, Tensor, Tensor],
        masked_positions: Tensor,
        pairs: int | None,
        masks: DropoutMasks | None = None,
        tied: TiedGradient | None = None,
        plan: Plan | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Last hidden states where a head looks: at the masked positions (M or more, H) and of [CLS].

        The former are filled up (`fill_up`), the latter (`pairs`, H), or None.
        """
        masked = fill_up(masked_positions)
        rows = masked if pairs is None else torch.cat([masked, packed[3][:-1]])
        if plan is None:
            hidden = self.bert(*packed, masks, tied, rows)
        else:
            hidden = self.bert.planned_states(*packed[:3], plan, masks, tied, rows)[-1]
        return hidden[: len(masked)], None if pairs is None else hidden[len(masked) : len(masked) + pairs]

    def _pairs(self, next_sentence_labels: Tensor | None) -> int | None:
        """How many [CLS] the second head looks at; None: it takes no part."""
        return len(next_sentence_labels) if self.next_sentence and next_sentence_labels is not None else None

    @torch.no_grad()
    def logits(
        self, token_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, sequence_starts: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """MLM logits at `positions` (M, V) and NSP logits (N, 2), float32, no dropout."""
        packed = (token_ids, segment_ids, position_ids, sequence_starts)
        masked, cls = self._wanted_hidden(packed, positions, len(sequence_starts) - 1)
        assert cls is not None
        mlm = F.linear(self.mlm_head(masked).float(), self.bert.embeddings.word, self.mlm_head.bias)[: len(positions)]
        return mlm, self.nsp_head(self.bert.pooler(cls)).float()

    @torch.no_grad()
    def evaluate(
        self,
        token_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        sequence_starts: Tensor,
        masked_positions: Tensor,
        masked_labels: Tensor,
        next_sentence_labels: Tensor | None,
        plan: Plan | None = None,
    ) -> PretrainingCounts:
        """Summed losses and right answers of one batch, no dropout, float32 logits."""
        packed = (token_ids, segment_ids, position_ids, sequence_starts)
        masked, cls = self._wanted_hidden(packed, masked_positions, self._pairs(next_sentence_labels), plan=plan)
        transformed = self.mlm_head(masked)[: len(masked_labels)]
        counts = PretrainingCounts(0.0, 0, int(masked_labels.numel()), 0.0, 0, 0)
        for rows, logits in logits_in_parts(transformed, self.bert.embeddings.word, self.mlm_head.bias):
            counts.mlm_loss += F.cross_entropy(logits, masked_labels[rows], reduction="sum").item()
            counts.mlm_correct += int((logits.argmax(1) == masked_labels[rows]).sum())
        if cls is not None and next_sentence_labels is not None:
            logits = self.nsp_head(self.bert.pooler(cls)).float()
            counts.nsp_loss = F.cross_entropy(logits, next_sentence_labels, reduction="sum").item()
            counts.nsp_correct = int((logits.argmax(1) == next_sentence_labels).sum())
            counts.nsp_targets = int(next_sentence_labels.numel())
        return counts
