"""FSD inside vLLM: its own engine drafts and verifies, and this package's rules accept.

vLLM drafts chains, so there are no trees here. docs/vllm.md says how it is started.
"""
