"""Which examples come up again: texts that the training file labels in two ways, and those scored on that it teaches.

What is scored on and was learnt says nothing of other texts; of two classes for one text one is wrong. Examples are the
same here where the model sees the same of them, their tokens once they are cut: what it cannot tell apart it cannot
label in two ways, whether the texts are equal or only what was cut off, or is [UNK], differs.
"""

from collections.abc import Sequence

from bertsmith.tasks.examples import EncodedSequence, EncodingReport, Example, QuestionExample

TWO_LABELS, IN_TRAINING = "labelled_in_two_ways", "also_in_training"
SENTENCES = {
    TWO_LABELS: "look to the model just like an earlier one that has another label",
    IN_TRAINING: "look to the model just like one that it learns from: their scores say nothing of other texts",
}
"""What the notes mean, for a warning: `N of the file's examples ...`."""


class SeenTexts:
    """The training file's examples, by a hash of their tokens, each with the label that it was first met with."""

    def __init__(self) -> None:
        self._labels: dict[int, int | None] = {}  # None: there are several

    def learn(self, example: Example, sequences: Sequence[EncodedSequence], report: EncodingReport) -> None:
        """Keep an example to learn from; note it where the same was met with another label before."""
        if not sequences:  # nothing of it is learnt
            return
        label = hash(tuple(sequence.targets.tobytes() for sequence in sequences))
        key = _key(sequences)
        # a question may have several right answers
        if self._labels.setdefault(key, label) != label and not isinstance(example, QuestionExample):
            self._labels[key] = None
            report.note(TWO_LABELS, 1, example.place)

    def look_up(self, example: Example, sequences: Sequence[EncodedSequence], report: EncodingReport) -> None:
        """Note an example that is scored on where the same is learnt from."""
        if sequences and _key(sequences) in self._labels:
            report.note(IN_TRAINING, 1, example.place)


def _key(sequences: Sequence[EncodedSequence]) -> int:
    # 64 bits: among a million examples two have one by chance once in thirty million files
    return hash(tuple((s.token_ids.tobytes(), s.second_segment, s.positions.tobytes()) for s in sequences))
