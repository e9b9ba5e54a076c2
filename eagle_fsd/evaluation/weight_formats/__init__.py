"""What each weight format costs and keeps: its distance from float32, its memory and its tau."""
