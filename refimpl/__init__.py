"""The definition of Gemma 4 in NumPy: clarity first, float64 when asked.

To learn the model, read in this order:

    config/        every fact about every layer, and where a GGUF file says it
    tensors.py     the weights: names, shapes
    ops/           the arithmetic, one pure function per step
    model/text.py  from token ids to logits; model/block.py is one layer
    cache.py       the keys and values that later tokens still see
    generate.py    the whole algorithm on one screen
    frontend/      text to ids and back

This package imports nothing at the top: who wants its nouns (config, tensors, batch, frontend) does not load
its verbs.
"""
