"""The server: an HTTP interface like OpenAI's over the scheduler. Needs the extra `serve`."""
