"""A second way to compute networks on a CPU: graphs that OpenVINO compiles, with their weights in few bits.

A graph is traced from a torch module. It reads committed keys and values where the cache keeps them.
"""
