"""SQuAD's official metrics: answers and gold answers in, one example at a time; exact match and F1 in percent out.

After the two evaluation scripts of the SQuAD site (Rajpurkar et al., 2016 and 2018), quirks included, so that numbers
compare: answers are lower-cased, ASCII punctuation and English articles dropped, and the best of the gold answers
counts. Chinese takes the same way: it has no spaces, so a whole answer is one word, F1 is all or nothing, and Chinese
punctuation stays. So beside them there is an F1 of characters where most gold answers have ideographs. Kept of an
example: three scores, its null score and two flags.
"""

import math
import re
import string
import unicodedata
from array import array
from collections import Counter

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError
from bertsmith.tasks.examples import QuestionExample
from bertsmith.text.words import IDEOGRAPHS

Floats = npt.NDArray[np.float64]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_IDEOGRAPH = re.compile(f"[{IDEOGRAPHS}]")


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    # in this order, as in the scripts: "a." becomes an article only once its full stop is gone
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(predicted: str, gold: str) -> float:
    """1 if both are the same once normalized, else 0."""
    return float(normalize_answer(predicted) == normalize_answer(gold))


def word_f1(predicted: str, gold: str) -> float:
    """F1 of the words of two answers, as bags, 0 to 1; 0 where either has no word left."""
    return _f1_of_bags(normalize_answer(predicted).split(), normalize_answer(gold).split())


def character_f1(predicted: str, gold: str) -> float:
    """The same of two answers whose ideographs are a word each, and without the punctuation of any script.

    As multilingual question answering counts Chinese (MLQA, Lewis et al. 2020), articles aside.
    """
    return _f1_of_bags(_split_characters(predicted), _split_characters(gold))


def _split_characters(text: str) -> list[str]:
    text = "".join(" " if unicodedata.category(letter).startswith("P") else letter for letter in normalize_answer(text))
    return _IDEOGRAPH.sub(r" \g<0> ", text).split()


def _f1_of_bags(ours: list[str], theirs: list[str]) -> float:
    common = (Counter(ours) & Counter(theirs)).total()
    if not common:
        return 0.0
    # the same as 2 · common / (all words), but rounded as in the scripts: the best threshold may hang on the last bit
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def score_answer(predicted: str, golds: list[str], version: int) -> tuple[float, float]:
    """(exact match, F1), 0 to 1, each the best over the gold answers; no golds: the right answer is "".

    The versions differ where nothing is left of a gold answer once normalized ("The"): v1.1 gives F1 0 even to the same
    words; v2.0 passes such an answer over, and asks for "" if there is no other.
    """
    if version == 2:
        golds = [gold for gold in golds if normalize_answer(gold)]
        if not golds:
            nothing = exact_match(predicted, "")
            return nothing, nothing
    return max(exact_match(predicted, gold) for gold in golds), max(word_f1(predicted, gold) for gold in golds)


class SquadMetrics:
    """Exact match and F1 of SQuAD v1.1 (`version` 1) or v2.0 (2).

    To choose a threshold, add for each question the best answer that is not empty, and its null score: how much the
    model prefers "no answer", such as the difference of the two scores (Devlin et al., section 4.3). To report, add the
    final answers, or say `compute(threshold)`.
    """

    def __init__(self, version: int) -> None:
        if version not in (1, 2):
            raise ValueError(f"SQuAD version {version!r} is not 1 (v1.1) or 2 (v2.0)")
        self.version = version
        self._exact, self._f1, self._null_scores = array("d"), array("d"), array("d")
        self._character_f1, self._with_ideographs = array("d"), 0
        self._answerable, self._answered = array("b"), array("b")

    @property
    def count(self) -> int:
        """Questions so far."""
        return len(self._exact)

    @property
    def answerable(self) -> int:
        """Questions so far that have an answer."""
        return self._answerable.count(1)

    @property
    def one_class_only(self) -> bool:
        """No question was given an answer."""
        return self.count > 0 and not any(self._answered)

    def add(self, example: QuestionExample, answer_text: str, null_score: float | None = None) -> None:
        """Score one answer; "" says that there is none. `null_score`: for all questions or none (v2.0 only).

        Raises UserError for a question without gold answers (v1.1) or of a file without any, ValueError for a null
        score that is not a number or is given for some questions only.
        """
        if example.answers is None:
            raise UserError(f"{example.place}: the question has no 'answers' to compare with; evaluate a labelled file")
        if not example.answers and self.version == 1:
            raise UserError(f"{example.place}: the question has no answer, as only SQuAD v2.0 allows; use squad2")
        if self.version == 2:
            if self.count and (null_score is None) != (not self._null_scores):
                raise ValueError("null scores are given for some questions only")
            if null_score is not None:
                if math.isnan(null_score):
                    raise ValueError(f"{example.place}: the null score is not a number")
                self._null_scores.append(null_score)
        golds = [answer.text for answer in example.answers]
        exact, f1 = score_answer(answer_text, golds, self.version)
        self._exact.append(exact)
        self._f1.append(f1)
        if any(map(_IDEOGRAPH.search, golds)):
            self._with_ideographs += 1
            f1 = max(character_f1(answer_text, gold) for gold in golds)
        self._character_f1.append(f1)
        self._answerable.append(bool(example.answers))
        self._answered.append(bool(answer_text))

    def compute(self, threshold: float | None = None) -> dict[str, float]:
        """Percentages, as the official scripts print; {} before the first question.

        v1.1: exact_match, f1. v2.0: exact_match ("exact" there), f1, total; the same for answerable questions
        (HasAns_exact, …) and the others (NoAns_…), where there are such; and, of null scores, best_exact, best_f1 and
        their thresholds: what the best threshold would have given. At 0 that may also mean "no answer anywhere".
        Where most gold answers have ideographs also f1_characters, which no official script has: `character_f1` of
        such questions, F1 of the others.

        threshold: count questions of a higher null score as answered by "", as the v2.0 script's --na-prob-thresh does
        (which is 1.0 there when not given; here, None takes answers as they are).
        """
        if not self.count:
            return {}
        if threshold is not None:
            self._check_null_scores()
        answerable = np.array(self._answerable, dtype=np.bool_)
        exact, f1, characters = np.array(self._exact), np.array(self._f1), np.array(self._character_f1)
        if self.version == 1:
            return {"exact_match": _percent(exact), "f1": _percent(f1)} | self._for_ideographs(characters)
        best = {}
        if self._null_scores:
            for name, scores in (("exact", exact), ("f1", f1)):
                best[f"best_{name}"], best[f"best_{name}_thresh"] = self._official_best(scores)
        if threshold is not None:
            withheld = np.array(self._null_scores) > threshold
            exact, f1, characters = (np.where(withheld, ~answerable, scores) for scores in (exact, f1, characters))
        computed = {"exact_match": _percent(exact), "f1": _percent(f1), "total": self.count}
        computed |= self._for_ideographs(characters)
        for name, group in (("HasAns", answerable), ("NoAns", ~answerable)):
            if group.any():
                computed[f"{name}_exact"] = _percent(exact[group])
                computed[f"{name}_f1"] = _percent(f1[group])
                computed[f"{name}_total"] = int(group.sum())
        return computed | best

    def _for_ideographs(self, scores: Floats) -> dict[str, float]:
        return {"f1_characters": _percent(scores)} if 2 * self._with_ideographs > self.answerable else {}

    def best_threshold(self) -> float:
        """The threshold for `compute`, and for prediction, at which F1 is highest; of equally good ones the lowest.

        Unlike the official best_f1_thresh it always gives that F1: questions of equal null score stand or fall
        together, and where "no answer anywhere" is best it lies below every null score. Raises ValueError without
        null scores.
        """
        self._check_null_scores()
        order, totals = self._sweep(np.array(self._f1) - (np.array(self._answerable) == 0))
        nulls = np.array(self._null_scores)[order]
        # a threshold can fall before the first null score and after the last of equal ones
        possible = np.concatenate(([True], nulls[1:] != nulls[:-1], [True]))
        best = int(np.argmax(np.where(possible, totals, -np.inf)))
        return float(nulls[best - 1] if best else np.nextafter(nulls[0], -np.inf))

    def _official_best(self, scores: Floats) -> tuple[float, float]:
        """Best percentage over thresholds and the first threshold that gives it, as the script sweeps: one by one."""
        answered = np.array(self._answered, dtype=np.float64)
        order, totals = self._sweep(np.where(np.array(self._answerable) == 1, scores, -answered))
        best = int(np.argmax(totals))
        return 100 * float(totals[best]) / self.count, float(self._null_scores[order[best - 1]]) if best else 0.0

    def _sweep(self, gains: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Questions by rising null score (n,); the sum of scores if the first 0, 1, … n keep their answers (n + 1,).

        gains: what a question's answer adds to its score for "no answer".
        """
        order = np.argsort(np.array(self._null_scores), kind="stable")
        nothing_answered = float(self._answerable.count(0))
        return order, np.cumsum(np.concatenate(([nothing_answered], gains[order])))

    def _check_null_scores(self) -> None:
        if not self._null_scores:
            raise ValueError("a threshold needs the null score of each question, as SQuAD v2.0 has them")


def _percent(scores: Floats) -> float:
    return 100 * float(scores.sum()) / len(scores)
