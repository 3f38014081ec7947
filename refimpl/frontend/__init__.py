"""Text in, text out: tokenizer, chat template, output parser, sampling.  Plain Python; the fast path uses
these same files.
"""
