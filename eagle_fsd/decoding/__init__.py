"""The decoding loop, its requests and its outputs."""
