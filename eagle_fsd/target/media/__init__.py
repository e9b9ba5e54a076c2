"""Images and sound in prompts."""
