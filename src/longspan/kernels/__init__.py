"""Attention kernels: each computes tiles on one device and has no knowledge of groups or plans."""
