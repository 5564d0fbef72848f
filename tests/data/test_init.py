"""The public names of longspan.data, and nothing else."""

import longspan.data


def test_all_is_what_is_public():
    assert longspan.data.__all__ == [
        "Batch",
        "ByteTokenizer",
        "DataConfig",
        "Document",
        "FitConfig",
        "FittedRows",
        "HuggingFaceTokenizer",
        "Loader",
        "Manifest",
        "Piece",
        "Rows",
        "TokenStore",
        "Tokenizer",
        "eval_batches",
        "fit_rows",
        "lengths_from_positions",
        "load_tokenizer",
        "open_store",
        "pack",
        "positions",
        "read_documents",
        "read_manifest",
        "shift_labels",
        "to_padded",
        "tokenize",
        "unigram_entropy",
        "write_manifest",
    ]


def test_every_public_name_has_a_docstring():
    assert [name for name in longspan.data.__all__ if not getattr(longspan.data, name).__doc__] == []
