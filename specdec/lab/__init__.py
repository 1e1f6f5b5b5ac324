"""The lab: what is measured and proved about decoding, and the commands that show it."""
