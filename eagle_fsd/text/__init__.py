"""Text and token ids: prompts and chats to ids, ids back to text, stop strings."""
