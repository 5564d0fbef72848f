"""Turn documents into tokens and tokens into packed batches. Labels and positions are computed on the global row.
`open_store` tokenises a corpus once, `Loader` deals its rows to data-parallel ranks, a `Batch` is ready to shard.
"""

from longspan.data.batch import Batch, lengths_from_positions, positions, shift_labels, to_padded
from longspan.data.data_config import DataConfig
from longspan.data.documents import Document, read_documents
from longspan.data.fit import FitConfig, FittedRows, fit_rows
from longspan.data.loader import Loader, eval_batches
from longspan.data.manifest import Manifest, read_manifest, write_manifest
from longspan.data.packing import Piece, Rows, pack, tokenize
from longspan.data.store import TokenStore, open_store, unigram_entropy
from longspan.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
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
