"""A server: a scheduler that lets requests join and leave one engine, and the OpenAI interface in front of it."""
