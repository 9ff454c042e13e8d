"""BERT with one output layer for a task (Devlin et al. 2018, figure 4), over packed batches.

Four heads cover all tasks: `sequence` (pooled [CLS] → classes or numbers), `choice` (pooled [CLS] → one score for each
choice's sequence), `token` (some tokens → tags) and `span` (every token → start and end scores). In transformers these
are BertForSequenceClassification, BertForMultipleChoice, BertForTokenClassification and BertForQuestionAnswering.
"""

from torch import Tensor, nn

from bertsmith.model.bert import BertModel, initialize_parameters
from bertsmith.model.config import BertConfig
from bertsmith.model.dropout import DropoutMasks, drop
from bertsmith.model.layers import Linear

# head → transformers' class
ARCHITECTURES = {
    "sequence": "BertForSequenceClassification",
    "choice": "BertForMultipleChoice",
    "token": "BertForTokenClassification",
    "span": "BertForQuestionAnswering",
}


class BertForTask(nn.Module):
    """Encoder (with pooler where the head looks at whole sequences) and the task's output layer.

    `head`: one of ARCHITECTURES. `outputs`: scores a position; `choice` has one, `span` two (start, end).
    """

    def __init__(self, config: BertConfig, head: str, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.head = head
        self.outputs = outputs
        self.bert = BertModel(config, pooled=head in ("sequence", "choice"))
        # two names for the same thing, as in transformers: the folder's tensors are called so
        if head == "span":
            self.qa_outputs = Linear(config.hidden_size, outputs)
        else:
            self.classifier = Linear(config.hidden_size, outputs)

    @property
    def output_layer(self) -> Linear:
        """The task's own layer, the only one without pre-trained weights."""
        return self.qa_outputs if self.head == "span" else self.classifier

    def initialize(self, seed: int) -> "BertForTask":
        """See `initialize_parameters`."""
        initialize_parameters(self, self.config.initializer_range, seed)
        return self

    def forward(
        self,
        token_ids: Tensor,  # (T,)
        segment_ids: Tensor,  # (T,)
        position_ids: Tensor,  # (T,)
        sequence_starts: Tensor,  # (N+1,)
        rows: Tensor | None,  # (R,)
        masks: DropoutMasks | None = None,
    ) -> Tensor:
        """Scores at the tokens `rows` (None: at all), (R, outputs) float32."""
        hidden = self.bert.pooler(
            self.bert(token_ids, segment_ids, position_ids, sequence_starts, masks, rows=rows)
        )  # (R, H)
        if self.head != "span":  # the reference has no dropout before the span scores
            hidden = drop(hidden, self.config.hidden_dropout_prob, masks)
        # in float32: between 4 and 8 bfloat16's numbers are 1/32 apart, too far for scores to be compared or correlated
        return self.output_layer(hidden.float())
