"""The table of docs/formats.md says what the code says."""

from pathlib import Path

import quant

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_table_is_right_and_complete():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 8 and row[0] in quant.FORMATS}
    assert set(table) == set(quant.FORMATS) - {"I8", "I16", "I32", "I64", "F64"}
    for name, (ggml_id, values, n_bytes, bits, file, quantiser, integer) in table.items():
        fmt = quant.FORMATS[name]
        assert (int(ggml_id), int(values), int(n_bytes)) == (fmt.ggml_id, fmt.block_size, fmt.block_bytes), (
            name
        )
        assert float(bits) == fmt.bits_per_weight, name
        assert (quantiser == "yes", integer == "yes") == (
            bool(fmt.quantize_blocks),
            bool(fmt.integer_parts),
        ), name
        assert f'Format("{name}"' in (source := Path(quant.__file__).with_name(file).read_text()) or (
            f'_format("{name}"' in source
        ), name
