"""Targets that are split among several processes, by transformers' own plan of tensor parallelism."""
