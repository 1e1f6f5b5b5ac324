"""The best static tree of measured acceptance, as a command."""
