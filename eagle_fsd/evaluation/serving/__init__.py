"""Servers of OpenAI's API under load: a soak of this package's own, and a race against others."""
