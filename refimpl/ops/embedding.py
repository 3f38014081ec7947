"""Rows of a table, one per token."""


def embed(table, ids, scale):
    """Look up one row per token id and scale it.

        out[t] = scale * table[ids[t]]

    Shapes:
        table  QTensor[V, C]  only the chosen rows are dequantised; a per-layer table has 2.3e9 values
        ids    i[T]
        scale  float
    Returns:
        f[T, C]: float32, or float64 when `scale` is a NumPy float64

    Notes:
        This is where the precision of a model call enters; all other ops return what they are given.
        Gemma scales embeddings by the square root of their width, here sqrt(D) = 39 to 73.  bfloat16 training
        rounds that factor (39.19 -> 39.25); we keep it unrounded, as every engine that reads GGUF files does.
    """
    return table.rows(ids) * scale
