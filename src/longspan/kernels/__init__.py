"""Attention kernels: each computes tiles on one device, without groups or plans."""
