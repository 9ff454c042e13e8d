"""bertsmith: the whole of BERT in one package, from raw text to a pre-trained, measured encoder."""

__version__ = "0.1.0"
