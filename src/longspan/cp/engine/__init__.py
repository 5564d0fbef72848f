"""The attention engine: runs one rank's share of a plan, forward and backward, as registered operators."""
