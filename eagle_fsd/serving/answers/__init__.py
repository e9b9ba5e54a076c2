"""Answers in the forms of OpenAI's API."""
