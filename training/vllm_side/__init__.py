"""What vLLM's own process imports, with this folder on its path: nothing of it needs the rest of this project."""
