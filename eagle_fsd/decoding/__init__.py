"""The decoding loop, what it is asked and what it gives back."""
