"""The tiny model and the made files of fine-tuning's tests (see made_tasks), and the one real model."""

from small_models import minilm

from made_tasks import files, knowing, model, quick_runs, tokenizer, tuned

__all__ = ["files", "knowing", "minilm", "model", "quick_runs", "tokenizer", "tuned"]
