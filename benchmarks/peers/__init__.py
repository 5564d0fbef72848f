"""longspan compared with its peers: `python -m benchmarks.peers`."""
