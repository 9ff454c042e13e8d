"""Which examples come up again: texts that the training file labels in two ways, and those scored on that it teaches.

Of a text with two labels one is wrong, and a score on what was learnt says nothing of other texts. Examples are the
same here where the model sees the same of them: their tokens, once they are cut.
"""

from collections.abc import Sequence

from bertsmith.tasks.examples import EncodedSequence, EncodingReport, Example, QuestionExample

TWO_LABELS, IN_TRAINING = "labelled_in_two_ways", "also_in_training"
SENTENCES = {
    TWO_LABELS: "are the same as an earlier one, as the model sees them, with another label: one of the two is wrong",
    IN_TRAINING: "are in the training file as well, as the model sees them: scores on them say nothing of other texts",
}
"""What the notes mean, for a warning: `N of the file's examples ...`."""


class SeenTexts:
    """The training file's examples, by a hash of their tokens, each with the label that it was first met with."""

    def __init__(self) -> None:
        self._labels: dict[int, int] = {}

    def learn(self, example: Example, sequences: Sequence[EncodedSequence], report: EncodingReport) -> None:
        """Keep an example to learn from; note it where the same was met with another label before."""
        if not sequences:  # nothing of it is learnt
            return
        label = hash(tuple(sequence.targets.tobytes() for sequence in sequences))
        # a question may have several right answers
        if self._labels.setdefault(_key(sequences), label) != label and not isinstance(example, QuestionExample):
            report.note(TWO_LABELS, 1, example.place)

    def look_up(self, example: Example, sequences: Sequence[EncodedSequence], report: EncodingReport) -> None:
        """Note an example that is scored on where the same is learnt from."""
        if sequences and _key(sequences) in self._labels:
            report.note(IN_TRAINING, 1, example.place)


def _key(sequences: Sequence[EncodedSequence]) -> int:
    # 64 bits: among a million examples two have one by chance once in thirty million files
    return hash(tuple((s.token_ids.tobytes(), s.second_segment, s.positions.tobytes()) for s in sequences))
