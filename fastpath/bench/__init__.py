"""Measuring: models of published sizes with random weights, rates of the machine, rows like llama-bench's."""
