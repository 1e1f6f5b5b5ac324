"""Draft models. Each file is one kind; `formats` loads and saves the layouts in which they are published."""
