"""Measurements: longspan beside plain PyTorch. Each file is one command, `python -m benchmarks.<name>`."""
