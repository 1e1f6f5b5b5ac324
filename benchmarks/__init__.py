"""What the project measures itself with."""
