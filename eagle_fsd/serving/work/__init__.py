"""The thread that makes a server's texts."""
