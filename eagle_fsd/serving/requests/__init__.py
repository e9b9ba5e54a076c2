"""Requests as clients send them."""
