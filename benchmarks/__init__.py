"""Benchmarks of longspan against plain PyTorch. Each file is one command, `python -m benchmarks.<name>`."""
