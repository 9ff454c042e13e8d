"""The tiny model and the made files of fine-tuning's tests; see made_tasks."""

from made_tasks import files, model, quick_runs, tokenizer, tuned

__all__ = ["files", "model", "quick_runs", "tokenizer", "tuned"]
